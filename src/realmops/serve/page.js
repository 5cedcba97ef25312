"use strict";
// Answers in place; without this script the same links and forms reload the page.
(() => {
  const field = document.getElementById("q"), status = document.getElementById("status");
  let pending = new AbortController();
  const show = async (url, addToHistory) => {
    pending.abort();
    const current = (pending = new AbortController());
    const result = document.getElementById("result");
    result.setAttribute("aria-busy", "true");
    status.textContent = "Reading the passages.";
    try {
      const reply = await fetch(url, { signal: current.signal });
      const page = new DOMParser().parseFromString(await reply.text(), "text/html");
      const newResult = page.getElementById("result");
      if (!newResult || current.signal.aborted) throw new Error("no answer");
      const hadFocus = result.contains(document.activeElement);
      result.replaceWith(newResult);
      if (hadFocus) newResult.focus();
      document.title = page.title;
      field.value = page.getElementById("q").value;
      status.textContent = page.getElementById("status").textContent;
      if (addToHistory) history.pushState(null, "", url);
      if (addToHistory && newResult.getBoundingClientRect().top < 0) newResult.scrollIntoView();
    } catch {
      if (!current.signal.aborted) location.assign(url);
    }
  };
  document.getElementById("ask").addEventListener("submit", (event) => {
    event.preventDefault();
    show("?" + new URLSearchParams({ q: field.value }), true);
  });
  document.addEventListener("click", (event) => {
    const link = event.target.closest("a[data-in-place]");
    if (!link || event.button || event.ctrlKey || event.metaKey || event.shiftKey || event.altKey) return;
    event.preventDefault();
    show(link.href, true);
  });
  document.addEventListener("submit", async (event) => {
    const form = event.target;
    if (!form.matches("[data-feedback]")) return;
    event.preventDefault();
    const body = new URLSearchParams(new FormData(form, event.submitter));
    const message = document.createElement("p");
    message.className = "soft";
    message.tabIndex = -1;
    try {
      const reply = await fetch(form.action, { method: "POST", body, redirect: "manual" });
      if (reply.type !== "opaqueredirect") throw new Error("not saved");
      message.textContent = "Thank you for your feedback.";
    } catch {
      message.textContent = "Your feedback could not be saved.";
    }
    form.replaceWith(message);
    message.focus();
    status.textContent = message.textContent;
  });
  addEventListener("popstate", () => show(location.href, false));
})();
