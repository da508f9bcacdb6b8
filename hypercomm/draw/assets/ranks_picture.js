// Grids as cells: one pane with one grid or several, or two panes, before and after a change.

class RanksPicture {
  constructor(scene, grids, levels, theme) {
    Object.assign(this, { scene, grids, theme, isChange: scene.kind === "change" });
    const size = levels.reduce((most, level) => Math.max(most, level.of.length), 0);
    this.world = new World(grids, size);
    this.isGuess = levels.length === 0;
    const known = this.isGuess ? blocksOf(grids, this.world) : levels;
    this.levels = crowded(known.map((level) => complete(level, this.world)));
    this.panes = (this.isChange ? grids : [null]).map(
      () => new CellPicture(this.world, this.levels),
    );
    this.places = this.panes.map(() => ({ x: 0, y: 0 }));
    this.inset = { left: 0, top: this.isChange ? 26 : 0 };
    this.grid = this.isChange || grids.length === 1 || !areDisjoint(grids, this.world) ? 0 : -1; // -1: all
    const askedFor = (side) =>
      (scene.changes ?? []).findIndex(
        (change) => change[side].length > 0 && change[side].join() === scene.dims.join(),
      );
    this.row = [askedFor("before"), askedFor("after"), 0].find((row) => row >= 0);
    this.dims = new Set(scene.dims);
    if (!this.dims.size) this.dims.add(this.firstDim());
    if (scene.edges?.length) this.panes[0].boxes.roomy = levelOfModules(this.levels);
    this.arrange(1.6);
    this.recolour();
  }

  firstDim() {
    const grid = this.shownGrids[0];
    return grid.dims[
      Math.max(
        0,
        grid.shape.findIndex((size) => size > 1),
      )
    ];
  }

  get shownGrids() {
    return this.grid < 0 ? this.grids : [this.grids[this.grid]];
  }

  /** The dims that can be lit: those of the grids that are shown, each name once. */
  get dimNames() {
    return [...new Set(this.shownGrids.flatMap((grid) => grid.dims))];
  }

  recolour() {
    const { theme, world, grids } = this;
    if (this.isChange) {
      const change = this.scene.changes[this.row] ?? { before: [], after: [] };
      const before = [grids[0], new Set(this.dimsOf(change, "before", "after"))];
      const after = [grids[1], new Set(this.dimsOf(change, "after", "before"))];
      this.panes[0].colour(new ChangeColouring(theme, world, before, after, "gone"));
      this.panes[1].colour(new ChangeColouring(theme, world, after, before, "new"));
    } else {
      this.panes[0].colour(new Colouring(theme, world, this.shownGrids, this.dims));
    }
  }

  /** The dims on one side of a change: beside groups that are gone, the new ones over the same dims. */
  dimsOf(change, side, other) {
    const isPartner = (each) => !each[other].length && each[side].join() === change[other].join();
    const partner = change[side].length ? change : this.scene.changes.find(isPartner);
    return partner?.[side] ?? [];
  }

  arrange(aspect) {
    const isWide = aspect > 1.1;
    const share = this.panes.length === 1 ? 1 : isWide ? 0.5 : 2;
    for (const pane of this.panes) pane.arrange(aspect * share);
    const { width, height } = this.panes[0];
    const gap = this.isChange ? Math.max(0.8, height * 0.08) : 0;
    this.places = this.panes.map((_, i) =>
      isWide ? { x: i * (width + gap), y: 0 } : { x: 0, y: i * (height + gap) },
    );
    this.ways = waysOf(this.scene.edges, this.panes[0]);
    const last = this.places.at(-1);
    const ends = this.ways.flat(); // arrows run beside and below the last frames, too
    this.width = Math.max(last.x + width, ...ends.map(([x]) => x));
    this.height = Math.max(last.y + height, ...ends.map(([, y]) => y));
  }

  setDetail(detail) {
    for (const pane of this.panes) pane.detail = detail;
  }

  /** The view of a pane, whose picture begins elsewhere. */
  viewOf(view, pane) {
    const moved = Object.create(view);
    const place = this.places[this.panes.indexOf(pane)];
    moved.x = view.x - place.x;
    moved.y = view.y - place.y;
    return moved;
  }

  paint(pen, view) {
    this.panes.forEach((pane, i) => {
      const own = this.viewOf(view, pane);
      pane.look(own);
      paintCells(pen, own, pane);
      if (this.isChange) this.paintTitle(pen, view, i);
    });
    if (this.grid < 0) paintArrows(pen, view, this.ways);
  }

  paintTitle({ ctx, theme }, view, i) {
    ctx.font = `600 14px ${theme.font}`;
    ctx.fillStyle = theme.ink;
    ctx.textAlign = "left";
    ctx.textBaseline = "bottom";
    const text = `${i ? "After" : "Before"}  ${this.grids[i].title}`;
    const room = this.panes[0].width * view.scale;
    ctx.fillText(
      shortened(ctx, text, Math.max(room, 60)),
      view.toX(this.places[i].x),
      view.toY(this.places[i].y) - 6,
    );
  }

  /** Fade all but some groups, given for each pane; where they are nearly all, nothing fades. */
  light(pen, view, lit) {
    const spots = this.panes.map((pane, i) => pane.spotsOf(lit[i]));
    const isMost = this.panes.every((pane, i) => spots[i].length > 0.8 * pane.shown.list.length);
    if (isMost) return;
    veil(pen, view);
    this.panes.forEach((pane, i) => lightUp(pen, this.viewOf(view, pane), pane, spots[i]));
    if (this.isChange) this.panes.forEach((_, i) => this.paintTitle(pen, view, i));
  }

  mark(pen, view, spot) {
    for (const pane of this.panes) {
      const own = this.viewOf(view, pane);
      if (spot.level === CELL && pane.shown.level === CELL && !this.isChange) {
        ringOthers(pen, own, pane, this.otherSlots(spot));
      }
      const box = pane.box(spot);
      outline(
        pen.ctx,
        own,
        box,
        pane === spot.pane ? pen.theme.focus : pen.theme.ink,
        pane === spot.pane ? 3 : 1.5,
        1,
      );
    }
  }

  /** The slots of a rank's other groups, over one dim each. */
  otherSlots(spot) {
    const rank = this.world.rankAt(spot.index);
    const slots = [];
    for (const grid of this.shownGrids) {
      const coords = grid.coordsOf(rank);
      const lit = grid.own(this.dims);
      for (const dim of coords ? grid.dims : []) {
        const only = new Set([dim]);
        if (lit.includes(dim) || grid.groupSize(only) > 2048) continue;
        for (const member of grid.members(grid.groupAt(coords, only), only)) {
          if (member !== rank) slots.push(this.world.slotOf(member));
        }
      }
    }
    return slots;
  }

  at(x, y) {
    for (const [i, pane] of this.panes.entries()) {
      const spot = pane.at(x - this.places[i].x, y - this.places[i].y);
      if (spot) return spot;
    }
    return null;
  }

  box(spot) {
    const place = this.places[this.panes.indexOf(spot.pane)];
    const box = spot.pane.box(spot);
    return { ...box, x: box.x + place.x, y: box.y + place.y };
  }

  first() {
    return this.panes[0].first();
  }

  adapt(spot) {
    return spot.pane.adapt(spot);
  }

  visible(spot) {
    return spot.pane.visible(spot);
  }

  /** One step by an arrow key; from the edge of a pane into the next one. */
  step(spot, right, down) {
    const next = spot.pane.step(spot, right, down);
    if (next !== spot || this.panes.length === 1) return next;
    const [first, second] = this.panes;
    const isWide = this.places[1].x > 0;
    const way = isWide ? right : down;
    if (way > 0 && spot.pane === first) return { ...spot, pane: second };
    if (way < 0 && spot.pane === second) return { ...spot, pane: first };
    return spot;
  }

  /** The groups that a spot lights, for each pane: the same ranks have others after a change. */
  groupsAt(spot) {
    return this.panes.map((pane) => pane.groupsAt(spot));
  }

  get groupCount() {
    return this.panes.reduce((sum, pane) => sum + pane.colouring.count, 0);
  }

  /** The lit groups where one number steps through those of all panes. */
  groupNumbered(number) {
    return this.panes.map((pane) => {
      const { count } = pane.colouring;
      const isHere = number >= 0 && number < count;
      const lit = isHere ? [number] : [];
      number -= count;
      return lit;
    });
  }

  /** What the legend depends on, but for the colours. */
  get legendKey() {
    return this.panes[0].shown.level;
  }

  canOpen(spot) {
    return spot.level !== CELL;
  }

  get summary() {
    const shown = this.isChange ? this.grids : this.shownGrids;
    const grids = shown.map((grid) => [grid.name, grid.title].filter(Boolean).join(" ")).join("; ");
    const total = this.levels
      .filter(({ isGuess }) => !isGuess)
      .map(
        ({ name, names }) =>
          `${names.length.toLocaleString("en")} ${names.length === 1 ? name : plural(name)}`,
      )
      .join(", ");
    const held = this.isChange ? this.world.size : shown.reduce((sum, grid) => sum + grid.size, 0);
    return `${held.toLocaleString("en")} ranks, ${grids}${total ? `, in ${total}` : ""}`;
  }
}
