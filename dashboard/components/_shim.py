"""Components whose JavaScript is a module of ours, served from ``dashboard/static``.

The inline part that Streamlit gets is only a shim that imports the module; what a component does is
in a file that the browser caches and other modules can import.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal

import streamlit as st
from streamlit.runtime.scriptrunner import get_script_run_ctx

Mount = Callable[..., None]

# Streamlit takes JavaScript without a newline for a path. The page's own path is cut off the address, so
# that the modules are found below a base path, behind a proxy and through a tunnel alike.
SHIM = """
export default async function (component) {
  const { data, parentElement } = component;
  let path = location.pathname.replace(/\\/+$/, "");
  const page = "/" + data.page;
  if (data.page && path.endsWith(page)) path = path.slice(0, -page.length);
  const base = location.origin + path + "/";
  try {
    const module = await import(base + "ddp/static/%s");
    return module.default({ ...component, data: data.data }, base);
  } catch (error) {
    console.error(error);
    parentElement.textContent =
      "This part of the page could not be loaded (" + error.message + "). Is the dashboard running? Reload the page.";
  }
}
"""


def module_component(name: str, module: str) -> Mount:
    """Register a component; call this once, at the level of a module.

    Args:
        name: The component's name, unique in the app.
        module: A JavaScript file in ``dashboard/static``. Its default export is called with Streamlit's
            component object (``data`` is what :func:`mount` was given) and the base URL of the app, ending in
            ``/``; at every rerun with other data and at every change of theme. It may return a function that
            cleans up when the component goes away.

    Returns:
        ``mount(data, key=…, height=…)``: shows the component. ``data`` must be JSON; ``height`` is in pixels,
        or ``"content"``.
    """
    # Not isolated: Plotly writes its styles into the page's head, which a shadow root would not see.
    component = st.components.v2.component(name, js=SHIM % module, isolate_styles=False)

    def mount(data: Mapping[str, Any], *, key: str, height: int | Literal["content"] = "content") -> None:
        component(key=key, data={"page": current_page(), "data": dict(data)}, height=height)

    return mount


def current_page() -> str:
    """The ``url_path`` of the page that runs now; empty for the default page."""
    context = get_script_run_ctx()
    if context is None:
        return ""
    page = context.pages_manager.get_pages().get(context.page_script_hash)
    return str(page.get("url_pathname") or "") if page else ""
