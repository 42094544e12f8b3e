// A page that its server updates in place; choices, typed text, opened parts and the scroll position are kept.

const POLL = 3000; // milliseconds; at least ten times as long as an update takes

// The user's state of the page that is not in `view`; each entry has a key that survives the rebuilding.
function widgets() {
  const counts = {};
  const keyOf = (node, kind) => {
    const place = `${node.closest("section[id]")?.id ?? ""} ${kind} ${node.tagName} ${node.getAttribute("aria-label") ?? ""}`;
    counts[place] = (counts[place] ?? 0) + 1;
    return place + counts[place];
  };
  const fire = (node, name) => node.dispatchEvent(new Event(name));
  const setField = (node, value) => {
    node.value = value;
    fire(node, node.tagName === "SELECT" ? "change" : "input");
  };
  const kinds = [
    ["input[type=search], select", (node) => node.value, setField],
    [".segmented", (node) => node.querySelector('[aria-pressed="true"]')?.dataset.value, (node, value) => [...node.children].find((button) => button.dataset.value === value)?.click()],
    ["details", (node) => node.open, (node, value) => (node.open = value)],
    [".scroll", (node) => node.scrollTop, (node, value) => (node.scrollTop = value)],
    ["input, select, button, canvas, summary", (node) => node === document.activeElement, (node) => node.focus({ preventScroll: true })],
  ];
  return kinds.flatMap(([selector, get, set]) =>
    [...page.querySelectorAll(selector)].map((node) => ({ key: keyOf(node, selector), get: () => get(node), set: (value) => set(node, value) })),
  );
}

function rebuild() {
  const before = new Map(widgets().map(({ key, get }) => [key, get()]));
  // Keep the element at the top of the window in place, whatever changes its height above it.
  const anchor = [...page.querySelectorAll("section[id]")].find((section) => section.getBoundingClientRect().bottom > 60);
  const [id, top] = window.scrollY > 0 && anchor ? [anchor.id, anchor.getBoundingClientRect().top] : [null, 0];
  build();
  for (const { key, get, set } of widgets()) {
    if (before.has(key) && before.get(key) !== get()) set(before.get(key));
  }
  const again = document.getElementById(id);
  if (again) window.scrollBy(0, again.getBoundingClientRect().top - top);
}

// When the newest row was logged, while the run is running.
function rowAge() {
  const { newestAt, finished } = content.run;
  return finished || newestAt == null ? null : element("span", { id: "age" }, "newest row at " + new Date(1000 * newestAt).toLocaleTimeString());
}

async function follow() {
  let pause = POLL;
  while (content.version !== null && !content.run.finished) {
    await new Promise((done) => setTimeout(done, pause));
    let answer;
    try {
      answer = await fetch("data?after=" + content.version);
    } catch {
      document.getElementById("age")?.after(element("span", { class: "pill open" }, "the command that follows the run has ended"));
      return;
    }
    if (answer.status !== 200) continue;
    const started = performance.now();
    const data = await answer.json();
    await load(data.content, data.arrays);
    rebuild();
    document.documentElement.dataset.version = content.version;
    pause = Math.max(POLL, 10 * (performance.now() - started));
  }
}
