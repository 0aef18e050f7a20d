// Before anything is drawn: the colours that somebody chose here, else those of the system.
"use strict";
{
  try {
    const chosen = localStorage.getItem("theme");
    if (chosen) document.documentElement.dataset.theme = chosen;
  } catch {
    // a browser that keeps nothing has the system's
  }
}
