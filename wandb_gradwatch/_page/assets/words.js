// The words beside each picture.

function words(key) {
  return element(
    "aside",
    { class: "words" },
    element("h3", {}, "Healthy"),
    element("p", {}, content.words[key].healthy),
    element("h3", {}, "Otherwise"),
    element("p", {}, content.words[key].otherwise),
  );
}

// A card: title, picture, and the words beside it.
function card(key, { wide = false } = {}) {
  const picture = element("div", { class: "picture" });
  const node = element(
    "section",
    { class: "card" + (wide ? " wide" : ""), id: key },
    element("h2", {}, content.words[key].title),
    element("div", { class: "beside" }, picture, words(key)),
  );
  return { node, picture };
}
