// Fingers on a picture: one moves the cursor, two move and stretch the steps; the page scrolls up and down as ever.

// partAt(event) gives the place across the picture, from 0 to 1; show(event) moves the cursor there.
function onTouch(node, { partAt, show, leave }) {
  const fingers = new Map(); // by id: the place on the axis that a finger holds, and where it is now
  let asked = false;

  function stretch() {
    asked = false;
    if (fingers.size !== 2) return;
    const [first, second] = [...fingers.values()].sort((a, b) => a.part - b.part);
    const apart = second.part - first.part;
    if (apart < 0.02 || second.place <= first.place) return;
    const across = (second.place - first.place) / apart;
    const low = first.place - first.part * across;
    setRange(stepAtPlace(low), stepAtPlace(low + across));
  }

  function down(event) {
    if (event.pointerType !== "touch") return;
    const part = partAt(event);
    fingers.set(event.pointerId, { part });
    for (const finger of fingers.values()) finger.place = placeOf(stepAcross(finger.part));
    if (fingers.size === 1) show(event);
    else leave();
  }

  function move(event) {
    const finger = fingers.get(event.pointerId);
    if (finger === undefined) return;
    finger.part = partAt(event);
    if (fingers.size === 1) return show(event);
    // Once for each frame that is drawn, however many events come.
    if (!asked) requestAnimationFrame(stretch);
    asked = true;
  }

  function up(event) {
    fingers.delete(event.pointerId);
  }

  node.addEventListener("pointerdown", down);
  node.addEventListener("pointermove", move);
  for (const end of ["pointerup", "pointercancel"]) node.addEventListener(end, up);
}
