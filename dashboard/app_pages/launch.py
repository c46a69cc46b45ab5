"""Launch page: the form, what it will do to this machine, and Start."""

from __future__ import annotations

import contextlib
import html
import re
import shlex
import time
import uuid
from collections import OrderedDict
from pathlib import Path
from typing import Any

import streamlit as st

from dashboard import form
from dashboard.components import panels
from ddp_core import config as config_module
from ddp_core import runs
from ddp_core.checkpoint_files import checkpoint_files
from ddp_core.config import RunConfig
from ddp_core.errors import UserError
from ddp_core.runs.gpus import describe_process

STATE = st.session_state
STORE = runs.Store()
# A second click of a double click can arrive when the run's page is already showing.
DOUBLE_CLICK_S = 3.0
LOOK_AGAIN_S = 2.0
DRAFTS_KEPT = 200
RUNS_TO_RESUME = 50


@st.cache_resource
def drafts() -> OrderedDict[str, dict[str, Any]]:
    """What was typed into each form, by the form's token: a reload or a copy of the tab goes on from there."""
    return OrderedDict()


@st.cache_data(ttl=2, show_spinner=False)
def machine_gpus() -> dict[str, Any]:
    """The GPUs of this machine and who is on them; shared by the reruns of a few keystrokes."""
    return runs.gpus_document()


@st.cache_data(max_entries=500, show_spinner=False)
def checkpoints_of(run: str, changed: int) -> dict[str, str]:
    """A run's checkpoints by path, the newest first, with words for each; listed anew when its folder changes."""
    return {
        str(path): f"{Path(run).name} · epoch {epoch}" + (f", step {step}" if step else "")
        for epoch, step, path in reversed(checkpoint_files(Path(run)))
    }


def checkpoint_names() -> dict[str, str]:
    """What there is to resume from: the checkpoints of the newest runs by path, with words for each."""
    found = []
    try:
        for run in STORE.runs():
            with contextlib.suppress(OSError):  # deleted at this moment
                found.append((run.path.stat().st_mtime_ns, str(run.path)))
    except UserError:  # a store that cannot be read is told of by others
        return {}
    names: dict[str, str] = {}
    for changed, path in sorted(found, reverse=True)[:RUNS_TO_RESUME]:
        names |= checkpoints_of(path, changed)
    return names


@st.cache_data(ttl=60, show_spinner="Looking at this machine…")
def demo() -> RunConfig:
    """What an untouched form shows: a run that works on this machine."""
    return runs.demo_config()


def widget(name: str) -> str:
    """Key of a value's widget in the form as it was filled last."""
    return f"launch_{STATE['launch_form_number']}.{name}"


def put(values: dict[str, Any]) -> None:
    """Show these values in the form.

    All widgets are new ones then: what the browser still sends of the old ones comes too late to count.
    """
    number = STATE.setdefault("launch_form_number", 0)
    for name in values:
        STATE.pop(widget(name), None)
    STATE["launch_form_number"] = number + 1
    for name, value in values.items():
        STATE[widget(name)] = value


def shown(key: str) -> str:
    """Key of a widget that is about to be shown, which must get its value again if it was away.

    Streamlit sends a value to the browser only in the run in which it is set.
    """
    if key not in STATE.get("launch_shown", ()):
        STATE[key] = STATE[key]
    now: set[str] = STATE["launch_shown_now"]
    now.add(key)
    return key


def open_form() -> str:
    """Find out which form this is and fill it.

    The form has a token, which is in the address: the same form in a second tab, or after a reload,
    is the same intent and starts the same run. A form that has started its run gives way to a new one.
    """
    asked, source = st.query_params.get("form"), st.query_params.get("from")
    mine: str | None = STATE.get("launch_token")
    came = STATE["ddp.came_from"] != STATE["ddp.page"]
    token = asked or mine
    if mine and token == mine and not came:
        st.query_params["form"] = mine
        return mine
    started, when = STATE.get("launch_started", ("", 0.0))
    if started and time.monotonic() - when < DOUBLE_CLICK_S:
        st.switch_page("app_pages/run.py", query_params={"run": started})
    before = drafts().get(token or "")
    if token is None or not re.fullmatch(r"[A-Za-z0-9]{1,64}", token) or STORE.launched(token):
        token = uuid.uuid4().hex[:12]
    STATE["launch_problem"] = None
    values = drafts().get(token) or (before if not source else None)
    if values is None:
        values = form.fill(demo())
        if source:
            try:
                values = form.fill(STORE.run(source).config())
            except UserError as error:
                STATE["launch_problem"] = f"The form shows the demo instead of {source}: {error}"
    put(values)
    STATE["launch_shown"] = set()
    STATE["launch_token"] = st.query_params["form"] = token
    return token


def current_values(token: str) -> dict[str, Any]:
    """What the form holds now; remembered under its token, also what is not on the screen."""
    draft = drafts().setdefault(token, form.fill(demo()))
    for key in draft:
        # Streamlit forgets a widget's value when it was not shown in a run.
        draft[key] = STATE.setdefault(widget(key), draft[key])
    STATE["launch_drawn"] = set()
    drafts().move_to_end(token)
    while len(drafts()) > DRAFTS_KEPT:
        drafts().popitem(last=False)
    return dict(draft)


def forget_what_is_away(values: dict[str, Any]) -> None:
    """Leave the values that have no widget in this run to the draft.

    What is set for a widget that does not come is kept by Streamlit beside the widget's own value, and
    would be back, as old as it is, when the widget has come and gone.
    """
    for name in values.keys() - STATE["launch_drawn"]:
        STATE.pop(widget(name), None)


# --- YAML in ---


def yaml_key() -> str:
    """Key of the text. Each new text from here is a new widget: a late message of the old one is ignored."""
    return f"launch_yaml_{STATE.setdefault('launch_yaml_number', 0)}"


def show_yaml(text: str) -> None:
    """Put a text into the YAML tab in place of what is there."""
    STATE["launch_yaml_number"] = STATE.get("launch_yaml_number", 0) + 1
    STATE["launch_yaml_problem"] = None
    STATE[yaml_key()] = STATE["launch_yaml_kept"] = text


def apply_yaml(key: str) -> None:
    """Fill the form from the text, or say what is wrong with it and keep it."""
    # A text that is gone, or that did not change, is an echo: the browser sends what it still holds.
    if key == yaml_key() and STATE[key] != STATE.get("launch_yaml_kept"):
        STATE["launch_yaml_kept"] = STATE[key]
        fill_from(STATE[key], "the YAML")


def fill_from(text: str, source: str) -> None:
    """Fill the form from YAML, or remember what is wrong with it."""
    try:
        config = config_module.from_yaml(text, source=source)
    except UserError as error:
        STATE["launch_yaml_problem"] = str(error)
    else:
        STATE["launch_yaml_problem"] = None
        put(form.fill(config))


def take_upload() -> None:
    """Put an uploaded file into the text and apply it."""
    file = STATE.get("launch_upload")
    if file is None:
        return
    try:
        show_yaml(file.getvalue().decode("utf-8"))
    except UnicodeDecodeError:
        STATE["launch_yaml_problem"] = f"{file.name} is not a text file"
        return
    fill_from(STATE[yaml_key()], file.name)


def reset() -> None:
    """Fill the form with the demo."""
    values = form.fill(demo())
    put(values)
    show_yaml(form.as_yaml(values))


# --- the form ---


def message(text: str, level: str = "error") -> None:
    """One sentence beside its field."""
    icon = {"error": "●", "warning": "▲"}.get(level, "")
    st.html(f'<p class="field-note {level}" role="alert"><span>{icon}</span> {html.escape(text)}</p>')


def show_field(name: str, notes: dict[str, list[tuple[str, str]]], gpus: dict[str, Any]) -> None:
    """One field with what there is to say about it."""
    field = form.FIELDS[name]
    key = shown(widget(name))
    STATE["launch_drawn"].add(name)
    with st.container(key=f"field_{name.replace('.', '_')}", gap=None):
        if field.kind == "toggle":
            st.toggle(field.label, key=key, help=field.help)
        elif field.kind == "choice":
            st.selectbox(field.label, field.options, key=key, help=field.help)
        elif field.kind == "suggest":
            st.selectbox(field.label, field.options, key=key, help=field.help, accept_new_options=True)
        elif field.kind == "checkpoint":
            names = checkpoint_names()
            st.selectbox(
                field.label,
                list(names),
                index=None,
                format_func=lambda path: names.get(path, path),
                key=key,
                help=field.help,
                accept_new_options=True,
                placeholder=field.placeholder,
            )
        elif field.kind == "env":
            st.text_area(field.label, key=key, help=field.help, height=68, placeholder="NCCL_DEBUG=INFO")
        elif field.kind == "gpus":
            show_gpus(field, gpus)
        else:
            st.text_input(field.label, key=key, help=field.help, live=True, placeholder=field.placeholder)
        for level, text in notes.get(name, []):
            message(text, level)


def show_gpus(field: form.FormField, gpus: dict[str, Any]) -> None:
    """The GPU picker: a mode and, for ``choose``, the GPUs that were found."""
    modes = {"auto": "Auto", "none": "None", "choose": "Choose…"}
    st.segmented_control(
        field.label, modes, format_func=modes.__getitem__, required=True, key=widget(field.name), help=field.help
    )
    if STATE[widget(field.name)] != "choose":
        return
    STATE["launch_drawn"].add(form.GPU_LIST)
    chosen: list[str] = STATE[widget(form.GPU_LIST)]
    names: dict[str, str] = {}
    for gpu in gpus["gpus"]:
        # A config may name a GPU by its UUID; then that is what the form keeps.
        token = gpu["uuid"] if gpu["uuid"] in chosen else str(gpu["index"])
        # Nothing that changes by itself: Streamlit tells choices apart by what is written on them.
        names[token] = f"{gpu['index']} · {gpu['name']}"
    options = [*names, *(token for token in chosen if token not in names)]
    st.multiselect(
        "Chosen GPUs",
        options,
        format_func=lambda token: names.get(token, f"{token} · not found"),
        key=shown(widget(form.GPU_LIST)),
        label_visibility="collapsed",
        placeholder="Choose GPUs" if options else "No GPU was found on this machine",
    )
    if gpus["gpus"]:
        rows = "".join(f"<li>{html.escape(gpu_words(gpu))}</li>" for gpu in gpus["gpus"])
        st.html(f'<ul class="gpu-words">{rows}</ul>')


def gpu_words(gpu: dict[str, Any]) -> str:
    """A GPU in one line: index, free memory and who is on it."""
    words = [f"GPU {gpu['index']}"]
    if gpu["status"] == "lost":
        return f"{words[0]}: lost, it fell off the bus"
    if gpu["memory_used"] is not None and gpu["memory_total"]:
        free = (gpu["memory_total"] - gpu["memory_used"]) / 2**30
        words.append(f"{free:.1f} of {gpu['memory_total'] / 2**30:.1f} GiB free")
    if gpu["run"]:
        words.append(f"held by {gpu['run']}")
    elif gpu["processes"]:
        words.append("used by " + ", ".join(describe_process(process) for process in gpu["processes"][:3]))
    else:
        words.append("not in use")
    return " · ".join(words)


def yaml_tab(values: dict[str, Any], *, just_opened: bool) -> None:
    """The config as text: edit, paste, upload, download."""
    form_yaml = form.as_yaml(values)
    if just_opened:
        # What could not be read stays for as long as it is neither mended nor discarded.
        problem = STATE.get("launch_yaml_problem")
        show_yaml(STATE["launch_yaml_kept"] if problem else form_yaml)
        STATE["launch_yaml_problem"] = problem
    key = yaml_key()
    st.text_area("Config as YAML", key=key, height=480, on_change=apply_yaml, args=(key,), label_visibility="collapsed")
    with st.container(key="yaml_message", gap=None):
        if problem := STATE.get("launch_yaml_problem"):
            message(problem)
        else:
            st.html(
                '<p class="field-note">An edit fills the form as soon as you leave the text or press Ctrl+Enter.</p>'
            )
    with st.container(horizontal=True, key="yaml_actions", gap="small", vertical_alignment="bottom"):
        st.file_uploader("Load a config file", type=["yaml", "yml"], key="launch_upload", on_change=take_upload)
        st.download_button(
            "Download",
            form_yaml,
            file_name=f"{values['name'] or 'run'}.yaml",
            mime="application/yaml",
            icon=":material/download:",
            on_click="ignore",
        )
        st.button(
            "Discard edit",
            on_click=show_yaml,
            args=(form_yaml,),
            icon=":material/undo:",
            disabled=not STATE.get("launch_yaml_problem"),
        )


def show_fields(key: str, names: list[str], notes: dict[str, list[tuple[str, str]]], gpus: dict[str, Any]) -> None:
    """Fields side by side."""
    if names:
        with st.container(key=f"grid_{key}"):
            for name in names:
                show_field(name, notes, gpus)


def form_groups(
    values: dict[str, Any], notes: dict[str, list[tuple[str, str]]], gpus: dict[str, Any], wrong: list[str]
) -> None:
    """All fields that mean something as the form is filled, group by group."""
    changed = form.changed(values)
    for group in form.GROUPS:
        names = [name for name in group.fields if form.applies(name, values) or name in notes]
        if group.open:
            st.html(f'<h2 class="section-title">{group.title}</h2>')
            show_fields(group.key, names, notes, gpus)
            continue
        counts = {"changed": len(changed.intersection(names)), "to mend": len({*wrong}.intersection(names))}
        label = " · ".join([group.title, *(f"{count} {word}" for word, count in counts.items() if count)])
        toggles = [name for name in names if form.FIELDS[name].kind == "toggle"]
        with st.expander(label, key=f"group_{group.key}"):
            show_fields(group.key, [name for name in names if name not in toggles], notes, gpus)
            show_fields(f"toggles_{group.key}", toggles, notes, gpus)


@st.fragment(run_every=LOOK_AGAIN_S)
def look_again(config: RunConfig, findings: list[runs.Finding]) -> None:
    """Draw the page anew when what kept a run from starting has changed: a lost GPU is back, a folder is there."""
    if runs.preflight(config) != findings:
        st.rerun()


def main() -> None:
    """Draw the page."""
    STATE["launch_shown_now"] = set()
    token = open_form()
    values = current_values(token)
    gpus = machine_gpus()
    config, problems = form.read(values)
    findings = []
    if config is not None:
        with st.spinner("Looking at this machine…", show_time=False):
            findings = runs.preflight(config)
    notes: dict[str, list[tuple[str, str]]] = {}
    for name, text in problems.items():
        notes.setdefault(name, []).append(("error", text))
    for finding in findings:
        if finding["level"] != "info" and finding["field"] != "launch.device":
            notes.setdefault(finding["field"] or "", []).append((finding["level"], finding["message"]))
        elif finding["field"] == "launch.device":
            STATE["launch_found"] = (finding["level"], finding["message"])
            if finding["level"] == "error":
                notes.setdefault("launch.device", []).append(("error", finding["message"]))
    if "launch_found" not in STATE:  # a form that came with a mistake
        about = (f for f in runs.preflight(demo()) if f["field"] == "launch.device")
        STATE["launch_found"] = next(((f["level"], f["message"]) for f in about), ("info", ""))
    blockers = [(name, text) for name, said in notes.items() for level, text in said if level == "error"]
    if STATE.get("launch_yaml_problem"):
        blockers.append(("YAML", "the text has a mistake; mend or discard it"))

    with st.container(key="launch_head", horizontal=True, vertical_alignment="center"):
        level, found = STATE["launch_found"]
        st.html(
            '<div class="page-title"><h1>New run</h1>'
            f'<p class="found {html.escape(level)}">{html.escape(found[:1].upper() + found[1:])}</p></div>'
        )
        st.button("Reset", on_click=reset, type="tertiary", help="Fill the form with the demo again")
        start = st.button(
            "Start",
            type="primary",
            icon=":material/play_arrow:",
            key=f"start_{token}",
            disabled=bool(blockers) or config is None,
        )
    # Always there, so that a message does not move (and thereby remount) what stands below it.
    with st.container(key="launch_messages", gap=None):
        st.html("<i></i>")  # Streamlit leaves out a container that is empty
        if start and config is not None:
            try:
                run = runs.launch(config, STORE, intent=token)
            except UserError as error:
                message(f"Not started: {error}")
            else:
                STATE["launch_started"] = (run.id, time.monotonic())
                st.switch_page("app_pages/run.py", query_params={"run": run.id})
        if STATE.get("launch_problem"):
            message(STATE["launch_problem"], "warning")
        if blockers:
            names = ", ".join(form.FIELDS[name].label if name in form.FIELDS else name for name, _ in blockers)
            message(f"Cannot start yet: {names}")
        for name, said in notes.items():
            if name not in form.FIELDS:
                for level, text in said:
                    message(text, level)

    with st.container(key="launch_panes"):
        with st.container(key="launch_form"):
            # Only one of them is there at a time: both are the same config, and one of them is right.
            form_tab, text_tab = st.tabs(["Form", "YAML"], key="launch_tab", on_change="rerun")
            with form_tab:
                if form_tab.open:
                    form_groups(values, notes, gpus, [name for name, _ in blockers])
            just_opened = bool(text_tab.open) and not STATE.get("launch_yaml_open")
            STATE["launch_yaml_open"] = bool(text_tab.open)
            with text_tab:
                if text_tab.open:
                    yaml_tab(values, just_opened=just_opened)
            STATE["launch_shown"] = STATE["launch_shown_now"]
        with st.container(key="launch_plan"):
            if config is not None:
                run_dir = STORE.root / STORE.next_id(config.name)
                STATE["launch_plan_shown"] = (
                    {
                        **runs.split_preview(config),
                        "batch_size": config.training.batch_size,
                        "accumulation": config.training.accumulation,
                        "nproc_per_node": config.launch.nproc_per_node,
                        "epochs": config.training.epochs,
                        "base_lr": config.training.lr,
                        "lr_scaling": config.training.lr_scaling,
                    },
                    shlex.join(runs.torchrun_command(config, run_dir)),
                )
            if "launch_plan_shown" in STATE:
                plan, command = STATE["launch_plan_shown"]
                stale = config is None or bool(STATE.get("launch_yaml_problem"))
                panels.plan(plan, stale=stale)
                st.html(f'<h2 class="section-title{" stale" * stale}">Command</h2>')
                st.code(command, language="bash", wrap_lines=True)
    forget_what_is_away(values)
    if config is not None and any(finding["level"] == "error" for finding in findings):
        look_again(config, findings)


main()
