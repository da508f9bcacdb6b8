// Puts the page together: state, frames, and what pointers, keys and fields do to them.

class Page {
  constructor(picture, theme) {
    Object.assign(this, { picture, theme });
    this.canvas = byId("picture");
    this.base = document.createElement("canvas"); // without what is lit, so that hovering draws little
    this.hover = null; // where the pointer is
    this.cursor = null; // where the arrow keys are
    this.held = null; // a group that stays lit: for each pane, as `groupsAt` gives them
    this.number = -1; // of that group, where the stepper chose it
    this.isStale = true;
    this.frameAsked = false;
    this.view = new View(picture, () => this.changed());
  }

  begin() {
    const { canvas, view } = this;
    listenToPointers(canvas, view, {
      pointed: ({ x, y }) => this.point(this.picture.at(...view.fromPixels(x, y)), x, y),
      clicked: ({ x, y }) => this.click(this.picture.at(...view.fromPixels(x, y))),
      left: () => this.point(null),
    });
    listenToKeys(this);
    listenToFields(this);
    canvas.addEventListener(
      "focus",
      () => this.isKeyboard() && this.moveTo(this.cursor ?? this.picture.first()),
    );
    canvas.addEventListener("blur", () => this.redraw());
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.changeTheme());
    new ResizeObserver(() => this.resize()).observe(byId("stage"));
    this.resize();
    this.refresh();
  }

  isKeyboard() {
    return this.canvas.matches(":focus-visible");
  }

  resize() {
    const stage = byId("stage");
    const [width, height] = [stage.clientWidth, stage.clientHeight];
    if (!width || !height) return;
    const sharpness = window.devicePixelRatio || 1;
    for (const canvas of [this.canvas, this.base]) {
      canvas.width = Math.round(width * sharpness);
      canvas.height = Math.round(height * sharpness);
    }
    if (this.view.isFit) this.rearrange(width / height);
    this.view.setWindow(width, height);
    this.frame(); // at once: an emptied canvas would flash
  }

  /** Give the picture the shape of the window; it stays all in sight. */
  rearrange(aspect) {
    this.picture.arrange(aspect);
    this.view.fit();
  }

  showAll() {
    const { view, picture } = this;
    const { width, height } = picture;
    picture.arrange(view.windowWidth / view.windowHeight);
    // A picture of another shape than before has no way from one place to the other.
    const isSame = width === picture.width && height === picture.height;
    if (isSame) view.fly(view.whole);
    else view.fit();
  }

  changed() {
    this.isStale = true;
    this.redraw();
  }

  redraw() {
    if (this.frameAsked) return;
    this.frameAsked = true;
    requestAnimationFrame(() => this.frame());
  }

  /** Draw one frame: the picture only if it has changed, then what is lit and pointed at. */
  frame() {
    this.frameAsked = false;
    const { picture, view, theme, canvas, base } = this;
    const sharpness = canvas.width / view.windowWidth;
    if (this.isStale) {
      const ctx = base.getContext("2d");
      ctx.setTransform(sharpness, 0, 0, sharpness, 0, 0);
      ctx.fillStyle = theme.paper;
      ctx.fillRect(0, 0, view.windowWidth, view.windowHeight);
      picture.paint({ ctx, theme }, view);
      this.isStale = false;
      if (this.legendKey !== picture.legendKey) showLegend(picture);
      this.legendKey = picture.legendKey;
    }
    const ctx = canvas.getContext("2d");
    ctx.setTransform(1, 0, 0, 1, 0, 0);
    ctx.drawImage(base, 0, 0);
    ctx.setTransform(sharpness, 0, 0, sharpness, 0, 0);
    const spot = this.spot;
    if (picture.light) {
      const lit = this.held ?? (spot && picture.groupsAt(spot));
      if (lit?.some((groups) => groups.length)) picture.light({ ctx, theme }, view, lit);
    }
    if (spot) picture.mark({ ctx, theme }, view, picture.visible(spot));
  }

  /** What is spoken of: what the pointer is on, else where the keys are. */
  get spot() {
    return this.hover ?? this.cursor;
  }

  about(spot) {
    return this.picture.about ? this.picture.about(spot) : aboutSpot(this.picture, spot);
  }

  point(spot, x, y) {
    const tip = byId("tip");
    tip.hidden = !spot;
    const was = this.hover;
    this.hover = spot;
    if (spot) {
      if (!isSame(was, spot)) tip.textContent = this.about(spot).tip;
      const isFarRight = x > this.view.windowWidth - 220;
      tip.style.transform = `translate(${isFarRight ? `calc(${x - 14}px - 100%)` : `${x + 16}px`}, ${Math.min(y + 18, this.view.windowHeight - 34)}px)`;
    }
    if (isSame(was, spot)) return;
    this.showSpot();
    this.redraw();
  }

  showSpot() {
    const spot = this.spot;
    showAbout(spot && this.about(spot), this.invitation);
  }

  get invitation() {
    const { scene } = this.picture;
    const notes = [scene.summary, ...(scene.notes ?? [])].filter(Boolean);
    const hint = this.picture.groupsAt ? "A click keeps its group lit, and opens a host." : "";
    const text = ["Or press Tab and the arrow keys.", hint].join(" ");
    return { heading: this.picture.groupsAt ? "Point at a rank" : "Point at a cell", text, notes };
  }

  click(spot) {
    if (!spot) {
      this.clear();
      return;
    }
    this.cursor = spot;
    if (this.picture.canOpen(spot)) this.open(spot);
    else if (this.picture.groupsAt) this.hold(spot);
    this.showSpot();
    this.redraw();
  }

  open(spot) {
    this.hover = null;
    byId("tip").hidden = true;
    const box = this.picture.box(spot);
    this.view.open(box, 64);
  }

  /** Keep the group of a spot lit, or let it go when it was. */
  hold(spot) {
    const groups = this.picture.groupsAt(spot);
    const isHeld = this.held && JSON.stringify(this.held) === JSON.stringify(groups);
    this.setHeld(isHeld || !groups.some((each) => each.length) ? null : groups);
  }

  setHeld(groups, number = -1) {
    this.held = groups;
    this.number = number;
    if (groups && number < 0 && this.picture.panes) {
      const pane = groups.findIndex((each) => each.length);
      this.number = groups[pane][0] + (pane > 0 ? this.picture.panes[0].colouring.count : 0);
    }
    const count = this.picture.groupCount ?? 0;
    byId("group-shown").textContent = this.held
      ? `${this.number} of ${count.toLocaleString("en")}`
      : `all ${count.toLocaleString("en")}`;
    this.redraw();
  }

  /** Light the next group, or the one before; behind the last one comes all of them. */
  stepGroup(by) {
    const count = this.picture.groupCount ?? 0;
    if (!count) return;
    const from = this.held ? this.number : by > 0 ? -1 : count;
    const next = from + by;
    this.setHeld(next < 0 || next >= count ? null : this.picture.groupNumbered(next), next);
    if (this.held) this.say(`Group ${next} of ${count}`);
  }

  moveTo(spot, isSpoken = true) {
    this.hover = null;
    byId("tip").hidden = true;
    this.cursor = spot;
    this.view.reveal(this.picture.box(spot));
    this.showSpot();
    if (isSpoken) this.say(this.about(spot).speech);
    this.redraw();
  }

  clear() {
    this.cursor = null;
    this.hover = null;
    byId("tip").hidden = true;
    this.setHeld(null);
    this.showSpot();
  }

  say(text) {
    byId("live").textContent = text;
  }

  toggle(dim) {
    const { dims } = this.picture;
    if (!dims.delete(dim)) dims.add(dim);
    this.recolour();
    const lit = this.picture.dimNames.filter((each) => dims.has(each)).join("+") || "no dims";
    this.say(`Groups over ${lit}: ${this.picture.groupCount}`);
  }

  choose(dims) {
    this.picture.dims = new Set(dims);
    this.recolour();
  }

  chooseGrid(index) {
    this.picture.grid = index;
    const known = new Set(this.picture.dimNames);
    this.picture.dims = new Set([...this.picture.dims].filter((dim) => known.has(dim)));
    if (!this.picture.dims.size) this.picture.dims.add(this.picture.firstDim());
    this.recolour();
  }

  chooseChange(row) {
    this.picture.row = row;
    this.recolour();
  }

  recolour() {
    this.picture.recolour();
    this.setHeld(null);
    this.refresh();
    this.changed();
  }

  changeTheme() {
    this.theme.read();
    this.refresh();
    this.changed();
  }

  /** Everything beside the canvas. */
  refresh() {
    const { picture } = this;
    byId("subtitle").textContent = picture.summary;
    byId("summary").textContent = picture.summary;
    this.canvas.setAttribute("aria-label", `${picture.scene.title}: ${picture.summary}`);
    this.canvas.textContent = picture.summary;
    byId("stepper").hidden = !picture.groupsAt;
    showModules(picture, (index) => this.chooseGrid(index));
    showDims(picture, (dim) => this.toggle(dim));
    showCombinations(picture, (dims) => this.choose(dims));
    showChanges(picture, (row) => this.chooseChange(row));
    showLegend(picture);
    showCrossing(picture);
    this.setHeld(this.held, this.number);
    this.showSpot();
  }
}

function isSame(one, other) {
  if (!one || !other) return one === other;
  return (
    one.pane === other.pane &&
    one.level === other.level &&
    one.index === other.index &&
    one.bin === other.bin
  );
}

async function start() {
  const scene = JSON.parse(byId("scene").textContent);
  const theme = new Theme(scene.palette);
  const levels = await readLevels(scene);
  let picture;
  if (scene.kind === "matrix") {
    const given = {};
    for (const name of ["sources", "targets", "rows", "columns", "amounts"])
      given[name] = await unpack(scene[name]);
    picture = new MatrixPicture(scene, given, levels, theme);
  } else {
    picture = new RanksPicture(scene, await readGrids(scene), levels, theme);
  }
  const page = new Page(picture, theme);
  page.begin();
  window.hypercomm = page; // for whoever looks at it with the browser's tools
  document.documentElement.dataset.ready = "yes";
}

start().catch((error) => {
  byId("stage").append(
    make(
      "p",
      { class: "failed", role: "alert" },
      `The picture could not be drawn: ${error.message}`,
    ),
  );
  throw error;
});
