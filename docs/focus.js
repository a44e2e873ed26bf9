// What scrolls can be scrolled by keys: the theme makes the boxes around wide tables, and forgets to let them be focused.
// The button that copies code is no landmark of the page.
function mend() {
  for (const box of document.querySelectorAll(".md-typeset__scrollwrap, .formula")) {
    if (box.scrollWidth > box.clientWidth) box.setAttribute("tabindex", "0");
    else box.removeAttribute("tabindex");
  }
  for (const nav of document.querySelectorAll(".md-code__nav")) nav.setAttribute("role", "none");
}
new MutationObserver(mend).observe(document.body, { childList: true, subtree: true });
addEventListener("load", mend);
addEventListener("resize", mend);
