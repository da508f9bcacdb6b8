// The keyboard and the fields of the page.

const ARROWS = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] };

/**
 * Keys that work wherever no field has the focus; arrows and Enter only on the picture, letters and
 * digits there and in the bar: who speaks to a page or reads it by keys meets them elsewhere.
 */
function listenToKeys(page) {
  const { canvas, view } = page;
  document.addEventListener("keydown", (event) => {
    const isTyping = event.target.matches?.("input, select, textarea");
    if (event.key === "/" && !isTyping) {
      event.preventDefault();
      byId("query").focus();
      byId("query").select();
      return;
    }
    if (event.key === "Escape") {
      escape(page, isTyping);
      return;
    }
    if (isTyping || event.ctrlKey || event.metaKey || event.altKey) return;
    if (event.target === canvas && onPicture(page, event.key)) event.preventDefault();
    else if (anywhere(page, view, event.key)) event.preventDefault();
    else if (event.target.closest?.("#picture, #bar") && toggleByKey(page, event.key))
      event.preventDefault();
  });
}

function onPicture(page, key) {
  const { picture } = page;
  if (ARROWS[key]) {
    const spot = page.cursor && picture.adapt(page.cursor);
    page.moveTo(spot ? picture.step(spot, ...ARROWS[key]) : picture.first());
    return true;
  }
  if ((key === "Enter" || key === " ") && page.cursor) {
    const spot = picture.adapt(page.cursor);
    if (picture.canOpen(spot)) page.open(spot);
    else if (picture.groupsAt) page.hold(spot);
    return true;
  }
  return false;
}

function anywhere(page, view, key) {
  if (key === "+" || key === "=") view.zoom(1.5);
  else if (key === "-" || key === "_") view.zoom(1 / 1.5);
  else if (key === "Home") page.showAll();
  else if (key === "[") page.stepGroup(-1);
  else if (key === "]") page.stepGroup(1);
  else return false;
  return true;
}

/** A digit is a dim by its place; a letter one that no other dim begins with. */
function toggleByKey(page, key) {
  const { picture } = page;
  if (!picture.dimNames || picture.isChange || key.length !== 1) return false;
  const names = picture.dimNames;
  if (key === "0") {
    page.choose(names);
    return true;
  }
  const begun = names.filter((dim) => dim.toLowerCase().startsWith(key.toLowerCase()));
  const dim = /[1-9]/.test(key)
    ? names[Number(key) - 1]
    : begun.length === 1
      ? begun[0]
      : undefined;
  if (dim === undefined) return false;
  page.toggle(dim);
  return true;
}

/** First leave the search, then what is lit, then the zoom. */
function escape(page, isTyping) {
  if (isTyping) {
    byId("query").value = "";
    showFound("");
    page.canvas.focus();
  } else if (page.held || page.cursor) {
    page.clear();
  } else {
    page.showAll();
  }
}

function showFound(text, isError = false) {
  byId("found").textContent = text;
  byId("found").classList.toggle("error", isError);
}

function listenToFields(page) {
  const { view, theme, picture } = page;
  byId("zoom-in").onclick = () => view.zoom(1.5);
  byId("zoom-out").onclick = () => view.zoom(1 / 1.5);
  byId("zoom-fit").onclick = () => page.showAll();
  byId("group-before").onclick = () => page.stepGroup(-1);
  byId("group-after").onclick = () => page.stepGroup(1);
  byId("theme").onclick = () => {
    theme.next();
    byId("theme").textContent = `Theme: ${theme.choice}`;
    page.changeTheme();
  };
  showDetails(picture, (detail) => {
    picture.setDetail(detail);
    page.changed();
  });
  const query = byId("query");
  query.placeholder =
    picture instanceof MatrixPicture
      ? `${picture.sources[0]}>${picture.targets.at(-1)}`
      : `${picture.world.rankAt(picture.world.size >> 1)} or ${example(picture)}`;
  query.addEventListener("input", () => showFound(""));
  byId("search").addEventListener("submit", (event) => {
    event.preventDefault();
    const found = find(picture, query.value);
    showFound(found.error ?? found.text, Boolean(found.error));
    if (found.spot) goTo(page, found.spot);
  });
}

/** Open the host around what was found, so that it is seen among its neighbours. */
function goTo(page, spot) {
  const { picture, view } = page;
  page.moveTo(spot);
  const isSeen =
    !spot.pane || spot.level === spot.pane.shown.level || spot.level > spot.pane.shown.level;
  const isLarge = picture.box(spot).width * view.scale > 14;
  if (isSeen && isLarge) return;
  let around = spot;
  if (spot.pane && spot.level === CELL && picture.levels.length) {
    around = { ...spot, level: 0, index: spot.pane.boxes.parentOf(CELL, spot.index) };
  }
  const box = picture.box(around);
  const rim = spot.pane ? 0.6 * box.width : 8;
  view.open(
    { x: box.x - rim, y: box.y - rim, width: box.width + 2 * rim, height: box.height + 2 * rim },
    40,
  );
}
