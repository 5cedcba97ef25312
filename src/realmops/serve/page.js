"use strict";
// Asks without leaving the page; without this script the same links and forms load it anew.
(() => {
  const field = document.getElementById("q"), said = document.getElementById("said");
  let waiting = new AbortController();
  const show = async (address, remember) => {
    waiting.abort();
    const mine = (waiting = new AbortController());
    const result = document.getElementById("result");
    result.setAttribute("aria-busy", "true");
    said.textContent = "The passages are being read.";
    try {
      const reply = await fetch(address, { signal: mine.signal });
      const page = new DOMParser().parseFromString(await reply.text(), "text/html");
      const fresh = page.getElementById("result");
      if (!fresh || mine.signal.aborted) throw new Error("no answer");
      const lost = result.contains(document.activeElement);
      result.replaceWith(fresh);
      if (lost) fresh.focus();
      document.title = page.title;
      field.value = page.getElementById("q").value;
      said.textContent = page.getElementById("said").textContent;
      if (remember) history.pushState(null, "", address);
      if (remember && fresh.getBoundingClientRect().top < 0) fresh.scrollIntoView();
    } catch {
      if (!mine.signal.aborted) location.assign(address);
    }
  };
  document.getElementById("ask").addEventListener("submit", (event) => {
    event.preventDefault();
    show("?" + new URLSearchParams({ q: field.value }), true);
  });
  document.addEventListener("click", (event) => {
    const link = event.target.closest("a[data-here]");
    if (!link || event.button || event.ctrlKey || event.metaKey || event.shiftKey || event.altKey) return;
    event.preventDefault();
    show(link.href, true);
  });
  document.addEventListener("submit", async (event) => {
    const form = event.target;
    if (!form.matches("[data-feedback]")) return;
    event.preventDefault();
    const body = new URLSearchParams(new FormData(form, event.submitter));
    const told = document.createElement("p");
    told.className = "soft";
    told.tabIndex = -1;
    try {
      const reply = await fetch(form.action, { method: "POST", body, redirect: "manual" });
      if (reply.type !== "opaqueredirect") throw new Error("not kept");
      told.textContent = "Noted, thank you.";
    } catch {
      told.textContent = "This could not be kept.";
    }
    form.replaceWith(told);
    told.focus();
    said.textContent = told.textContent;
  });
  addEventListener("popstate", () => show(location.href, false));
})();
