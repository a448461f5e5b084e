"use strict";
// Sorting, filtering, copying and unpacking. The page can be read without it.
(() => {
  const root = document.documentElement;
  const make = (tag, properties = {}) => Object.assign(document.createElement(tag), properties);
  const said = document.getElementById("said");

  const kept = {
    read(key) { try { return JSON.parse(sessionStorage.getItem(key)); } catch { return null; } },
    write(key, value) { try { sessionStorage.setItem(key, JSON.stringify(value)); } catch { /* a page in a file may have no storage */ } },
  };

  // Light and dark: as the system has it, until somebody says otherwise.
  const dark = document.getElementById("dark");
  const usual = dark.media;
  const themes = { automatic: usual, light: "not all", dark: "screen" };
  const button = make("button", { type: "button", className: "plain theme" });
  const choose = (name) => {
    dark.media = themes[name];
    button.textContent = `Colours: ${name}`;
    button.dataset.theme = name;
    kept.write("theme", name);
  };
  button.addEventListener("click", () => {
    const names = Object.keys(themes);
    choose(names[(names.indexOf(button.dataset.theme) + 1) % names.length]);
  });
  document.querySelector("header").prepend(button);
  const theme = kept.read("theme");
  choose(theme in themes ? theme : "automatic");

  // A row and what is said below it are one body, so they move and hide together.
  const value = (body, column) => {
    const cell = body.rows[0].cells[column];
    if (cell.dataset.number !== undefined) return Number(cell.dataset.number);
    return cell.textContent.trim();
  };
  const compare = (one, other) => {
    if (typeof one === "number" && typeof other === "number") return one - other;
    return String(one).localeCompare(String(other), "en", { numeric: true });
  };
  const sort = (table, column, direction) => {
    const numeric = table.tHead.rows[0].cells[column].classList.contains("number");
    const empty = (found) => found === "" || (numeric && typeof found !== "number");
    const bodies = [...table.tBodies].map((body) => [value(body, column), body]);
    bodies.sort(([one, first], [other, second]) => {
      if (direction === "none") return first.dataset.place - second.dataset.place;
      if (empty(one) || empty(other)) return empty(one) - empty(other);
      return direction === "ascending" ? compare(one, other) : compare(other, one);
    });
    table.append(...bodies.map(([, body]) => body));
    [...table.tHead.rows[0].cells].forEach((head, index) => {
      if (index === column && direction !== "none") head.setAttribute("aria-sort", direction);
      else head.removeAttribute("aria-sort");
    });
    table.dataset.sorted = JSON.stringify([column, direction]);
  };
  const directions = { none: "ascending", ascending: "descending", descending: "none" };

  for (const table of document.querySelectorAll("[data-filtered] table")) {
    [...table.tBodies].forEach((body, place) => { body.dataset.place = place; });
    [...table.tHead.rows[0].cells].forEach((head, column) => {
      const name = head.textContent;
      const own = make("button", { type: "button", textContent: name });
      own.addEventListener("click", () => {
        sort(table, column, directions[head.getAttribute("aria-sort") ?? "none"]);
        said.textContent = `${name}: ${head.getAttribute("aria-sort") ?? "in the order of the experiment"}`;
      });
      head.replaceChildren(own);
    });

    const line = make("div", { className: "filter" });
    const input = make("input", { type: "search", id: `filter-${table.id}`, autocomplete: "off", spellcheck: false });
    const label = make("label", { htmlFor: input.id, textContent: "Only rows with" });
    const count = make("output");
    count.setAttribute("for", input.id);
    const filter = () => {
      const words = input.value.toLowerCase().split(/\s+/).filter(Boolean);
      let shown = 0;
      for (const body of table.tBodies) {
        const text = body.textContent.toLowerCase();
        body.hidden = !words.every((word) => text.includes(word));
        shown += !body.hidden;
      }
      count.textContent = words.length ? `${shown} of ${table.tBodies.length} rows` : "";
    };
    input.addEventListener("input", filter);
    input.addEventListener("keydown", (event) => {
      if (event.key === "Escape") { input.value = ""; filter(); }
    });
    line.append(label, input, count);
    table.closest(".table").prepend(line);
  }

  for (const pre of document.querySelectorAll("pre.command")) {
    const copy = make("button", { type: "button", className: "plain", textContent: "Copy" });
    copy.setAttribute("aria-label", `Copy: ${pre.textContent.trim().slice(0, 80)}`);
    copy.addEventListener("click", async () => {
      const text = pre.querySelector("code").textContent;
      try {
        await navigator.clipboard.writeText(text);
        copy.textContent = said.textContent = "Copied";
      } catch { // no clipboard here: it is marked, to be copied by hand
        getSelection().selectAllChildren(pre.querySelector("code"));
        copy.textContent = said.textContent = "Marked";
      }
      setTimeout(() => { copy.textContent = "Copy"; }, 2000);
    });
    pre.classList.add("copied");
    pre.append(copy);
  }

  // What is packed is saved as it was before, where the browser can unpack it.
  if (typeof DecompressionStream === "function") {
    for (const link of document.querySelectorAll("a[data-packed]")) {
      link.download = link.download.replace(/\.gz$/, "");
      link.addEventListener("click", async (event) => {
        if (link.href.startsWith("blob:")) return;
        event.preventDefault();
        const packed = Uint8Array.from(atob(link.href.split(",")[1]), (one) => one.charCodeAt(0));
        const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"));
        link.href = URL.createObjectURL(await new Response(stream).blob());
        link.click();
      });
    }
  }

  // Paper has no triangles to click on: what belongs to the text is opened.
  let opened = [];
  addEventListener("beforeprint", () => {
    opened = [...document.querySelectorAll("details.prints:not([open])")];
    for (const one of opened) one.open = true;
  });
  addEventListener("afterprint", () => { for (const one of opened) one.open = false; });
})();
