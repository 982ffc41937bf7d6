// A table of records that stays put while its data change: rows are matched by
// key, so that focus, scroll position and opened rows survive each refresh.
// Every text is set through textContent: nothing from a request becomes markup.

const SVG = "http://www.w3.org/2000/svg";
const SHAPES = {
  diamond: "M6 0 12 6 6 12 0 6Z",
  "diamond-open": "M6 1.2 10.8 6 6 10.8 1.2 6Z",
  cross: "M1.5 1.5 10.5 10.5M10.5 1.5 1.5 10.5",
  plus: "M6 .5V11.5M.5 6H11.5",
  triangle: "M6 .5 12 11.5 0 11.5Z",
  "circle-open": "M6 1.5a4.5 4.5 0 1 0 .01 0Z",
  circle: "M6 .5a5.5 5.5 0 1 0 .01 0Z",
  square: "M1 1H11V11H1Z",
  bar: "M1 6H11",
  pause: "M3 1V11M9 1V11",
};
const OUTLINED = new Set(["diamond-open", "cross", "plus", "circle-open", "bar", "pause"]);

function element(tag, className, text) {
  const node = document.createElement(tag);
  if (className) node.className = className;
  if (text !== undefined && text !== null) node.textContent = text;
  return node;
}

function shape(name) {
  const svg = document.createElementNS(SVG, "svg");
  svg.setAttribute("viewBox", "0 0 12 12");
  svg.setAttribute("aria-hidden", "true");
  svg.setAttribute("class", OUTLINED.has(name) ? "shape outlined" : "shape");
  const path = document.createElementNS(SVG, "path");
  path.setAttribute("d", SHAPES[name] ?? SHAPES["circle-open"]);
  svg.append(path);
  return svg;
}

function ago(ms) {
  const s = Math.max(0, (Date.now() - ms) / 1000);
  if (s < 10) return `${s.toFixed(0)} s ago`;
  if (s < 100) return `${Math.round(s)} s ago`;
  if (s < 6000) return `${Math.round(s / 60)} min ago`;
  if (s < 48 * 3600) return `${Math.round(s / 3600)} h ago`;
  return `${Math.round(s / 86400)} d ago`;
}

function copyButton(text) {
  const button = element("button", "copy");
  button.type = "button";
  button.title = "Copy";
  button.setAttribute("aria-label", `Copy ${text}`);
  button.append(element("span", "copy-glyph"));
  button.addEventListener("click", async (event) => {
    event.stopPropagation();
    await navigator.clipboard.writeText(text);
    button.classList.add("done");
    setTimeout(() => button.classList.remove("done"), 1200);
  });
  return button;
}

// As a step in the browser's history, which Streamlit follows within the session. A
// switch by the server (st.switch_page) races with the timers of a live page: a
// refresh that was asked for before it clears the page that is shown after it.
function navigate(href) {
  window.history.pushState({}, "", new URL(href, window.location.href));
  window.dispatchEvent(new PopStateEvent("popstate"));
}

function anchor(link) {
  const node = element("a", link.mono ? "mono" : "", link.text);
  node.href = link.href;
  if (link.external) {
    node.target = "_blank";
    node.rel = "noopener noreferrer";
    return node;
  }
  node.addEventListener("click", (event) => {
    if (event.metaKey || event.ctrlKey || event.shiftKey) return;
    event.preventDefault();
    navigate(link.href);
  });
  return node;
}

const CELLS = {
  text(cell) {
    const node = element("span", cell.mono ? "mono" : "", cell.text);
    if (cell.quiet) node.classList.add("quiet");
    return node;
  },
  number(cell) {
    return element("span", "number", cell.text);
  },
  id(cell) {
    const node = element("span", "id");
    const first = element("span", "line");
    first.append(anchor(cell.link), copyButton(cell.copy));
    node.append(first);
    if (cell.sub) {
      const second = element("span", "line sub");
      second.append(cell.sub.href ? anchor(cell.sub) : element("span", "", cell.sub.text));
      node.append(second);
    }
    return node;
  },
  lines(cell) {
    const node = element("span", "id");
    node.append(element("span", "line", cell.text));
    if (cell.sub) node.append(element("span", "line sub quiet", cell.sub));
    return node;
  },
  when(cell) {
    const node = element("time", "when", ago(cell.ms));
    node.dataset.ms = cell.ms;
    node.dateTime = new Date(cell.ms).toISOString();
    node.title = new Date(cell.ms).toLocaleString();
    return node;
  },
  tag(cell) {
    const node = element("span", `tag ${cell.tone}`);
    node.append(shape(cell.shape), element("span", "", cell.text));
    if (cell.note) node.append(element("span", "note", cell.note));
    return node;
  },
  share(cell) {
    const node = element("span", "share");
    node.setAttribute("role", "img");
    node.setAttribute("aria-label", cell.label);
    const bar = element("span", "share-bar");
    for (const [name, part] of cell.parts) {
      if (part <= 0) continue;
      const segment = element("span", `segment ${name}`);
      segment.style.flexGrow = part;
      bar.append(segment);
    }
    node.append(bar, element("span", "share-text", cell.text));
    return node;
  },
};

function fillCell(node, cell) {
  const content = (CELLS[cell.kind] ?? CELLS.text)(cell);
  if (cell.help) content.title = cell.help;
  node.replaceChildren(content);
}

function detailNode(detail) {
  const box = element("div", "detail");
  const list = element("dl");
  for (const item of detail.items) {
    list.append(element("dt", "", item.label));
    const value = element("dd");
    value.append(element("span", item.mono ? "mono" : "", item.text));
    if (item.copy) value.append(copyButton(item.copy));
    list.append(value);
  }
  box.append(list);
  if (detail.links?.length) {
    const links = element("div", "links");
    for (const link of detail.links) links.append(anchor(link));
    box.append(links);
  }
  return box;
}

function buildRow(row, columns, state) {
  const tr = element("tr", row.strong ? "row strong" : "row");
  tr.dataset.key = row.key;
  if (row.detail) {
    const cell = element("td", "toggle");
    const button = element("button", "chevron");
    button.type = "button";
    button.setAttribute("aria-label", `Why: ${row.name ?? row.key}`);
    button.setAttribute("aria-expanded", String(state.opened.has(row.key)));
    cell.append(button);
    tr.append(cell);
  }
  for (const [index, column] of columns.entries()) {
    const td = element("td", column.align ?? "");
    td.dataset.label = column.label;
    fillCell(td, row.cells[index]);
    tr.append(td);
  }
  return tr;
}

function buildDetail(row, columns) {
  const tr = element("tr", "detail-row");
  const td = element("td");
  td.colSpan = columns.length + 1;
  td.append(detailNode(row.detail));
  tr.append(td);
  return tr;
}

function header(columns, hasDetail) {
  const tr = element("tr");
  if (hasDetail) {
    const th = element("th", "toggle");
    th.append(element("span", "hidden", "Why"));
    tr.append(th);
  }
  for (const column of columns) {
    const th = element("th", column.align ?? "");
    th.scope = "col";
    th.append(element("span", "", column.label));
    if (column.help) {
      const mark = element("span", "help", "?");
      mark.title = column.help;
      mark.tabIndex = 0;
      mark.setAttribute("role", "note");
      mark.setAttribute("aria-label", `${column.label}: ${column.help}`);
      th.append(mark);
    }
    tr.append(th);
  }
  return tr;
}

function focusPath(root) {
  const active = root.getRootNode().activeElement;
  const tr = active?.closest?.("tr[data-key]");
  if (!tr) return null;
  const index = [...tr.querySelectorAll("a,button")].indexOf(active);
  return { key: tr.dataset.key, index };
}

function render(root, data, state) {
  const { columns, rows } = data;
  const hasDetail = rows.some((row) => row.detail);
  const head = JSON.stringify([columns, hasDetail]);
  if (state.head !== head) {
    state.head = head;
    state.rows.clear();
    const table = element("table");
    table.append(element("caption", "hidden", data.caption), element("thead"), element("tbody"));
    table.tHead.append(header(columns, hasDetail));
    root.replaceChildren(table);
  }
  const body = root.querySelector("tbody");
  const focus = focusPath(root);
  const wanted = [];
  const seen = new Set();
  for (const row of rows) {
    seen.add(row.key);
    const signature = JSON.stringify(row);
    let held = state.rows.get(row.key);
    if (held?.signature !== signature) {
      const isNew = !held && state.rendered;
      const changed = held && held.stamp !== row.stamp;
      held = { signature, stamp: row.stamp, tr: buildRow(row, columns, state), detail: null };
      if (isNew || changed) held.tr.classList.add("fresh");
      if (row.detail) held.detail = buildDetail(row, columns);
      held.tr.addEventListener("click", (event) => {
        if (!row.detail || event.target.closest("a, .copy, .help")) return;
        if (root.getRootNode().getSelection?.()?.toString()) return;
        toggle(root, state, row.key);
      });
      state.rows.set(row.key, held);
    }
    wanted.push(held.tr);
    if (held.detail && state.opened.has(row.key)) wanted.push(held.detail);
    held.tr.classList.toggle("open", state.opened.has(row.key));
  }
  for (const key of [...state.rows.keys()]) if (!seen.has(key)) state.rows.delete(key);
  place(body, wanted);
  if (focus && focus.index >= 0) {
    const tr = state.rows.get(focus.key)?.tr;
    const again = tr?.querySelectorAll("a,button")[focus.index];
    if (again && again !== root.getRootNode().activeElement) again.focus({ preventScroll: true });
  }
  state.rendered = true;
}

// Move as few nodes as possible: what is not touched keeps the scroll anchored.
function place(body, wanted) {
  const keep = new Set(wanted);
  for (const node of [...body.children]) if (!keep.has(node)) node.remove();
  let next = body.firstChild;
  for (const node of wanted) {
    if (node === next) next = next.nextSibling;
    else body.insertBefore(node, next);
  }
}

function toggle(root, state, key) {
  const held = state.rows.get(key);
  if (!held?.detail) return;
  const opening = !state.opened.has(key);
  if (opening) state.opened.add(key);
  else state.opened.delete(key);
  held.tr.classList.toggle("open", opening);
  held.tr.querySelector(".chevron").setAttribute("aria-expanded", String(opening));
  if (opening) held.tr.after(held.detail);
  else held.detail.remove();
}

function move(root, event) {
  const step = { ArrowDown: 1, ArrowUp: -1 }[event.key];
  const tr = event.target.closest?.("tr[data-key]");
  if (!step || !tr) return;
  const rows = [...root.querySelectorAll("tr[data-key]")];
  const next = rows[rows.indexOf(tr) + step];
  if (!next) return;
  const index = [...tr.querySelectorAll("a,button")].indexOf(event.target);
  const targets = next.querySelectorAll("a,button");
  (targets[index] ?? targets[0])?.focus();
  event.preventDefault();
}

export default function (component) {
  const { data, parentElement } = component;
  const root = parentElement.querySelector(".records");
  if (!root || !data) return;
  if (!root.state) {
    root.state = { rows: new Map(), opened: new Set(), head: "", rendered: false };
    root.addEventListener("keydown", (event) => move(root, event));
  }
  render(root, data, root.state);
  const clock = setInterval(() => {
    for (const node of root.querySelectorAll("time[data-ms]")) {
      const text = ago(Number(node.dataset.ms));
      if (node.textContent !== text) node.textContent = text;
    }
  }, 1000);
  return () => clearInterval(clock);
}
