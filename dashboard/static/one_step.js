// One step to another page is one entry of the browser's history.
//
// Streamlit makes two: this page with the next one's query, then the next page. Back would stop at the first, which is
// the address of nothing ("/run?from=…"). And the launch page adds its form's token to its own address, which is no step
// at all: Back would lead to the address without it, which gets the token again.
const STEP_MS = 5000; // between the two halves of a step lies a run of the page's script

export function oneEntryAStep() {
  if (history.pushState.ddp) return;
  const push = history.pushState.bind(history);
  let halfway = -Infinity;
  history.pushState = (state, unused, url) => {
    const to = new URL(url ?? "", location.href);
    const samePage = to.pathname === location.pathname;
    const secondHalf = !samePage && to.search === location.search && performance.now() - halfway < STEP_MS;
    const noStep = samePage && withoutForm(to.search) === withoutForm(location.search);
    halfway = samePage && !noStep ? performance.now() : -Infinity;
    if (secondHalf || noStep) history.replaceState(state, unused, url);
    else push(state, unused, url);
  };
  history.pushState.ddp = true;
}

function withoutForm(search) {
  const parameters = new URLSearchParams(search);
  parameters.delete("form");
  return parameters.toString();
}
