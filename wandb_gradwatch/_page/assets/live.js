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
  const setOpen = (node, value) => {
    node.open = value;
    fire(node, "toggle"); // fill it now: the browser's own event comes after the scroll position is restored
  };
  const kinds = [
    ["input[type=search], select", (node) => node.value, setField],
    [".segmented", (node) => node.querySelector('[aria-pressed="true"]')?.dataset.value, (node, value) => [...node.children].find((button) => button.dataset.value === value)?.click()],
    ["details.data", (node) => node.open, setOpen],
    [".picker-list, .scroll", (node) => node.scrollTop, (node, value) => (node.scrollTop = value)],
    ["input, select, button, canvas, .plot, summary", (node) => node === document.activeElement, (node) => node.focus({ preventScroll: true })],
  ];
  return kinds.flatMap(([selector, get, set]) =>
    [...page.querySelectorAll(selector)].map((node) => ({ key: keyOf(node, selector), get: () => get(node), set: (value) => set(node, value) })),
  );
}

async function rebuild() {
  const before = new Map(widgets().map(({ key, get }) => [key, get()]));
  // Keep the element at the top of the window in place, whatever changes its height above it.
  const anchor = [...page.querySelectorAll("section[id]")].find((section) => section.getBoundingClientRect().bottom > 60);
  const [id, top] = window.scrollY > 0 && anchor ? [anchor.id, anchor.getBoundingClientRect().top] : [null, 0];
  build();
  for (const { key, get, set } of widgets()) {
    if (before.has(key) && before.get(key) !== get()) set(before.get(key));
  }
  await new Promise((done) => queueMicrotask(done)); // uPlot lays out its charts in a microtask
  const again = document.getElementById(id);
  if (again) window.scrollBy(0, again.getBoundingClientRect().top - top);
}

// Show how long ago the newest row was logged, while the run is running.
function rowAge() {
  const { newestAt, finished } = content.run;
  if (finished || newestAt === null || newestAt === undefined) return null;
  const node = element("span", { id: "age" });
  const tell = () => {
    if (!node.isConnected && node.textContent) return clearInterval(timer);
    const seconds = Math.max(0, Math.round(Date.now() / 1000 - newestAt));
    const [count, unit] = seconds < 120 ? [seconds, "s"] : seconds < 7200 ? [Math.round(seconds / 60), "min"] : [Math.round(seconds / 3600), "h"];
    node.textContent = `newest row ${count} ${unit} ago`;
  };
  const timer = setInterval(tell, 1000);
  tell();
  return node;
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
    await rebuild();
    document.documentElement.dataset.version = content.version;
    pause = Math.max(POLL, 10 * (performance.now() - started));
  }
}
