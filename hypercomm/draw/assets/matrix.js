// Who sends how much to whom: a row for each source, a column for each target.

const LEAST_HOST = 12; // pixels between two lines

class MatrixPicture {
  constructor(scene, { sources, targets, rows, columns, amounts }, levels, theme) {
    Object.assign(this, { scene, sources, targets, levels, theme, amounts });
    this.width = targets.length;
    this.height = sources.length;
    this.inset = { left: 58, top: 40 };
    this.rowOf = new Map([...sources].map((rank, row) => [rank, row]));
    this.columnOf = new Map([...targets].map((rank, column) => [rank, column]));
    this.cells = new Map(); // row * width + column -> amount
    rows.forEach((source, i) => {
      const key = this.rowOf.get(source) * this.width + this.columnOf.get(columns[i]);
      this.cells.set(key, (this.cells.get(key) ?? 0) + amounts[i]);
    });
    const breaks = ({ of }, ranks) =>
      [...ranks.keys()].filter((i) => i && of[ranks[i]] !== of[ranks[i - 1]]);
    this.parted = null; // the level between whose units lines are drawn
    this.breaks = levels.map((level) => ({
      name: level.name,
      rows: breaks(level, sources),
      columns: breaks(level, targets),
    }));
    this.binned = new Map(); // for each power of two, what squares of that many rows hold
    this.bin = 1;
  }

  arrange() {} // a matrix has the shape that it has

  get legendKey() {
    return `${this.bin} ${this.parted}`;
  }

  /** Sums over squares of `bin` rows and columns: what moves, and what stays on its rank. */
  bins(bin) {
    if (!this.binned.has(bin)) {
      const across = Math.ceil(this.width / bin);
      const sums = new Map(); // place -> [moves, stays]
      for (const [key, amount] of this.cells) {
        const [row, column] = [Math.floor(key / this.width), key % this.width];
        const place = Math.floor(row / bin) * across + Math.floor(column / bin);
        if (!sums.has(place)) sums.set(place, [0, 0]);
        sums.get(place)[this.sources[row] === this.targets[column] ? 1 : 0] += amount;
      }
      let largest = 0;
      let hasStaying = false; // squares that nothing leaves
      for (const [moves, stays] of sums.values()) {
        largest = Math.max(largest, moves);
        hasStaying ||= stays > 0 && moves === 0;
      }
      this.binned.set(bin, { sums, across, largest, hasStaying });
    }
    return this.binned.get(bin);
  }

  paint(pen, view) {
    const { ctx, theme } = pen;
    this.bin = 1;
    while (view.scale * this.bin < 4) this.bin *= 2;
    const { sums, across, largest } = this.bins(this.bin);
    const whole = pixels(view, { x: 0, y: 0, width: this.width, height: this.height });
    ctx.fillStyle = theme.frame;
    ctx.fillRect(whole.x, whole.y, whole.width, whole.height);
    this.paintLines(pen, view, whole);
    const side = this.bin * view.scale;
    const gap = side > 12 ? 1 : side > 6 ? 0.5 : 0;
    for (const [place, [moves, stays]] of sums) {
      const x = view.toX((place % across) * this.bin);
      const y = view.toY(Math.floor(place / across) * this.bin);
      if (x > view.windowWidth || y > view.windowHeight || x + side < 0 || y + side < 0) continue;
      const staying = { fill: theme.palette.mixed, ink: INK_ON_FILL };
      const { fill, ink } = moves ? theme.shade(moves, largest) : staying;
      ctx.fillStyle = fill;
      ctx.fillRect(x + gap, y + gap, side - 2 * gap, side - 2 * gap);
      if (side < 34) continue;
      ctx.fillStyle = ink;
      ctx.textAlign = "center";
      ctx.textBaseline = "middle";
      write(
        ctx,
        theme,
        amountText(moves || stays, this.scene.unit).replace(/ (element|part)s?$/, ""),
        x + side / 2,
        y + side / 2,
        side * 0.86,
        side * 0.26,
        500,
      );
    }
    this.paintHosts(pen, view, whole);
    this.paintHeads(pen, view);
  }

  paintLines({ ctx, theme }, view, whole) {
    if (view.scale < 9) return;
    ctx.strokeStyle = theme.edge;
    ctx.lineWidth = 0.5;
    ctx.beginPath();
    for (let column = 0; column <= this.width; column++) {
      ctx.moveTo(view.toX(column), whole.y);
      ctx.lineTo(view.toX(column), whole.y + whole.height);
    }
    for (let row = 0; row <= this.height; row++) {
      ctx.moveTo(whole.x, view.toY(row));
      ctx.lineTo(whole.x + whole.width, view.toY(row));
    }
    ctx.stroke();
  }

  /** Lines between hosts, or between the units of the first level that are wide enough. */
  paintHosts({ ctx, theme }, view, whole) {
    const wide = this.breaks.find(({ rows, columns }) => {
      const most = Math.max(rows.length / this.height, columns.length / this.width);
      return view.scale >= LEAST_HOST * most;
    });
    this.parted = wide?.name ?? null;
    if (!wide) return;
    ctx.strokeStyle = theme.faint;
    ctx.lineWidth = 1;
    ctx.beginPath();
    for (const column of wide.columns) {
      ctx.moveTo(view.toX(column), whole.y);
      ctx.lineTo(view.toX(column), whole.y + whole.height);
    }
    for (const row of wide.rows) {
      ctx.moveTo(whole.x, view.toY(row));
      ctx.lineTo(whole.x + whole.width, view.toY(row));
    }
    ctx.stroke();
  }

  /** Ranks along the edges, which stay in sight: each, or every 2nd, 5th, 10th ... */
  paintHeads({ ctx, theme }, view, lit = null) {
    const { left, top } = this.inset;
    ctx.fillStyle = theme.paper;
    ctx.fillRect(0, 0, view.windowWidth, top);
    ctx.fillRect(0, 0, left, view.windowHeight);
    ctx.font = `500 12px ${theme.font}`;
    ctx.fillStyle = theme.faint;
    ctx.textBaseline = "middle";
    const fromX = Math.max(left, view.toX(0));
    const fromY = Math.max(top, view.toY(0));
    ctx.textAlign = "left";
    ctx.fillText("receives →", fromX, fromY - 28);
    ctx.textAlign = "right";
    ctx.fillText("sends ↓", fromX - 6, fromY - 11);
    ctx.font = `11px ${theme.font}`;
    const digits = String(Math.max(...[this.sources.at(-1), this.targets.at(-1)])).length;
    const every = (room) =>
      [1, 2, 4, 8, 16, 32].find((n) => n * view.scale >= room) ??
      2 ** Math.ceil(Math.log2(room / view.scale));
    const across = every(digits * 7 + 5);
    const down = every(13);
    const head = (text, x, y, isLit) => {
      if (isLit) {
        const room = ctx.measureText(text).width + 8;
        ctx.fillStyle = theme.paper;
        ctx.fillRect(ctx.textAlign === "right" ? x - room + 4 : x - room / 2, y - 8, room, 16);
      }
      ctx.fillStyle = isLit ? theme.ink : theme.faint;
      ctx.fillText(text, x, y);
    };
    ctx.textAlign = "center";
    for (
      let column = Math.max(0, Math.floor(view.x));
      column < Math.min(this.width, view.seen.right);
      column++
    ) {
      const x = view.toX(column + 0.5);
      if (column % across === 0 && x > left) head(this.targets[column], x, fromY - 11, false);
    }
    if (lit) head(this.targets[lit.column], view.toX(lit.column + 0.5), fromY - 11, true);
    ctx.textAlign = "right";
    for (
      let row = Math.max(0, Math.floor(view.y));
      row < Math.min(this.height, view.seen.bottom);
      row++
    ) {
      const y = view.toY(row + 0.5);
      if (row % down === 0 && y > top) head(this.sources[row], fromX - 6, y, false);
    }
    if (lit) head(this.sources[lit.row], fromX - 6, view.toY(lit.row + 0.5), true);
  }

  /** A row and a column light up, where they meet. */
  mark(pen, view, spot) {
    const { row, column, bin } = spot;
    const { ctx, theme } = pen;
    ctx.globalAlpha = 0.12;
    ctx.fillStyle = theme.focus;
    const strip = pixels(view, { x: 0, y: row, width: this.width, height: bin });
    const pillar = pixels(view, { x: column, y: 0, width: bin, height: this.height });
    ctx.fillRect(strip.x, strip.y, strip.width, strip.height);
    ctx.fillRect(pillar.x, pillar.y, pillar.width, pillar.height);
    ctx.globalAlpha = 1;
    outline(ctx, view, this.box(spot), theme.focus, 3, 1);
    this.paintHeads(pen, view, spot);
  }

  at(x, y) {
    if (x < 0 || y < 0 || x >= this.width || y >= this.height) return null;
    return this.adapt({ row: Math.floor(y), column: Math.floor(x) });
  }

  adapt({ row, column }) {
    const { bin } = this;
    return {
      row: row - (row % bin),
      column: column - (column % bin),
      bin,
      level: CELL,
      index: row * this.width + column,
    };
  }

  visible(spot) {
    return this.adapt(spot);
  }

  first() {
    return this.adapt({ row: 0, column: 0 });
  }

  box({ row, column, bin }) {
    return {
      x: column,
      y: row,
      width: Math.min(bin, this.width - column),
      height: Math.min(bin, this.height - row),
    };
  }

  step(spot, right, down) {
    const row = clamp(spot.row + down * spot.bin, 0, this.height - 1);
    const column = clamp(spot.column + right * spot.bin, 0, this.width - 1);
    return this.adapt({ row, column });
  }

  canOpen({ bin }) {
    return bin > 1;
  }

  amountAt({ row, column, bin }) {
    const { sums, across } = this.bins(bin);
    return sums.get(Math.floor(row / bin) * across + Math.floor(column / bin)) ?? [0, 0];
  }

  about(spot) {
    const ends = (ranks, from) => {
      const last = Math.min(from + spot.bin, ranks.length) - 1;
      return last > from ? `${ranks[from]}…${ranks[last]}` : String(ranks[from]);
    };
    const [from, to] = [ends(this.sources, spot.row), ends(this.targets, spot.column)];
    const [moves, stays] = this.amountAt(spot);
    const amount = moves || stays;
    const what = amount ? amountText(amount, this.scene.unit) : "nothing";
    const where = [
      ["sends", this.placed(from)],
      ["receives", this.placed(to)],
      ["amount", what],
    ];
    if (amount && this.scene.unit === "B" && amount >= 1024)
      where.push(["exactly", `${amount.toLocaleString("en")} B`]);
    if (this.scene.whole && amount) {
      where.push(["share", `${((100 * amount) / this.scene.whole).toPrecision(3)} % of the whole`]);
    }
    const { unit } = this.scene;
    if (moves && stays) where.push(["stays", `${amountText(stays, unit)} more, on their rank`]);
    else if (stays) {
      const who = spot.bin === 1 ? "the same rank: it stays" : "each rank's own: all of it stays";
      where.push(["note", `${who} where it is`]);
    }
    const heading = `${from} → ${to}`;
    return {
      heading,
      where,
      groups: [],
      speech: `${rankText(from).replace("r", "R")} ${isOne(from) ? "sends" : "send"} ${what} to ${rankText(to)}`,
      tip: `${heading} · ${what}`,
    };
  }

  placed(ends) {
    const units = this.levels.map((level) => level.names[level.of[Number(ends)]]).filter(Boolean);
    return [rankText(ends), ...units].join(", ");
  }

  get summary() {
    let [pairs, moved, stayed] = [0, 0, 0];
    for (const [moves, stays] of this.bins(1).sums.values()) {
      pairs += moves > 0 ? 1 : 0;
      moved += moves;
      stayed += stays;
    }
    const { unit } = this.scene;
    const stay = stayed ? `; ${amountText(stayed, unit)} stay on their rank` : "";
    const [rows, columns] = [this.height.toLocaleString("en"), this.width.toLocaleString("en")];
    return `${rows} sources, ${columns} targets, ${pairs.toLocaleString("en")} pairs, ${amountText(moved, unit)} in all${stay}`;
  }
}

function isOne(ends) {
  return !ends.includes("…");
}

function rankText(ends) {
  return `${isOne(ends) ? "rank" : "ranks"} ${ends}`;
}
