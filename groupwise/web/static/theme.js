// Before anything is drawn: the colours that somebody chose here, else those of the system.
"use strict";
{
  const chosen = localStorage.getItem("theme");
  if (chosen) document.documentElement.dataset.theme = chosen;
}
