// What is said of a rank, of a unit or of a cell of a matrix: as data, which panel.js shows.
//
// {heading, where: [[label, text]], groups: [{label, number, count, size, ranks, colour}], speech, tip}

const MOST_RANKS = 16; // of a group that are listed

/** About what a picture of ranks has at a spot. */
function aboutSpot(picture, spot) {
  return spot.level === CELL ? aboutRank(picture, spot) : aboutUnit(picture, spot);
}

function aboutRank(picture, spot) {
  const rank = picture.world.rankAt(spot.index);
  const units = unitsAround(picture, spot);
  const where = units.map(({ name, unit }) => [name, unit]);
  const groups = [];
  const coordinates = [];
  const panes = picture.isChange ? picture.grids : picture.shownGrids;
  panes.forEach((grid, i) => {
    const label = picture.isChange ? ["before", "after"][i] : grid.name;
    const coords = grid.coordsOf(rank);
    if (!coords) {
      if (picture.isChange) where.push([label, "not in it"]);
      return;
    }
    coordinates.push(grid.dims.map((dim, axis) => `${dim}=${coords[axis]}`).join(", "));
    where.push([label || "at", coordinates.at(-1)]);
    groups.push(...groupsOfRank(picture, i, grid, coords, spot));
  });
  if (!coordinates.length) where.push(["spare", "in no grid"]);
  const host = units.length ? `, ${unitTitle(units[0].name, units[0].unit)}` : "";
  return {
    heading: `Rank ${rank}`,
    where,
    groups,
    speech: `Rank ${rank}${host}, ${coordinates.join("; ") || "in no grid"}. ${groups.map(spoken).join(". ")}`,
    tip: `${rank} · ${coordinates.join(" · ") || "spare"}`,
  };
}

/** The groups of one rank: over the lit dims first, then over each dim. */
function groupsOfRank(picture, pane, grid, coords, spot) {
  const { colouring } = picture.panes[picture.isChange ? pane : 0];
  const lit = picture.isChange ? colouring.dims : new Set(grid.own(picture.dims));
  const every = grid.dims.filter((_, axis) => grid.shape[axis] > 1).map((dim) => new Set([dim]));
  const isLit = (dims) => dims.size === lit.size && [...dims].every((dim) => lit.has(dim));
  if (lit.size && !every.some(isLit)) every.unshift(lit);
  if (picture.isChange) every.splice(0, every.length, ...(lit.size ? [lit] : []));
  return every.map((dims) => {
    const number = grid.groupAt(coords, dims);
    const id = isLit(dims) ? colouring.groupOf[spot.index] : -1;
    const result = picture.isChange && id >= 0 ? ` · ${colouring.result(id)}` : "";
    return {
      label: grid.own(dims).join("+") + result,
      number,
      count: grid.groupCount(dims),
      size: grid.groupSize(dims),
      ranks: firstMembers(grid, number, dims),
      colour: id >= 0 ? colouring.fill(id) : null,
      dims,
    };
  });
}

function firstMembers(grid, number, dims) {
  return grid.groupSize(dims) > 65536 ? [] : grid.members(number, dims).slice(0, MOST_RANKS);
}

function spoken({ label, number, count, ranks, size }) {
  const list = size <= 8 ? `, ranks ${ranks.join(" ")}` : `, ${size} ranks`;
  return `${label}: group ${number} of ${count}${list}`;
}

function unitsAround(picture, spot) {
  const units = [];
  let { level, index } = spot;
  while (level + 1 < spot.pane.boxes.top) {
    index = spot.pane.boxes.parentOf(level, index);
    level += 1;
    units.push({ name: picture.levels[level].name, unit: picture.levels[level].names[index] });
  }
  return units;
}

/** "Host gpu-17", but "host17" alone. */
function unitTitle(level, name) {
  return name.toLowerCase().startsWith(level)
    ? name
    : `${level[0].toUpperCase()}${level.slice(1)} ${name}`;
}

function aboutUnit(picture, spot) {
  const { name, names } = picture.levels[spot.level];
  let [low, high, size] = [Infinity, -Infinity, 0];
  spot.pane.boxes.forEachSlot(spot.level, spot.index, (slot) => {
    low = Math.min(low, slot);
    high = Math.max(high, slot);
    size += 1;
  });
  const held = spot.pane.held(spot.level, spot.index);
  const { colouring } = spot.pane;
  const groups = [...held.keys()].filter((group) => group >= 0).sort((a, b) => a - b);
  const ranks = `${picture.world.rankAt(low)}…${picture.world.rankAt(high)}`;
  const where = unitsAround(picture, spot).map((each) => [each.name, each.unit]);
  where.push([
    "ranks",
    size === 1
      ? String(picture.world.rankAt(low))
      : `${ranks}, ${size.toLocaleString("en")} of them`,
  ]);
  if (held.has(SPARE)) where.push(["spare", `${held.get(SPARE)} in no grid`]);
  let whole = 0;
  const some = groups.map((group) => {
    const { grid, own, number } = colouring.local(group);
    const size = grid.groupSize(own);
    const here = held.get(group);
    whole += here === size;
    return {
      label: colouring.name(group),
      number,
      count: 0,
      size,
      here,
      ranks: [],
      colour: colouring.fill(group),
    };
  });
  if (groups.length) where.push(["groups", `${groups.length}, of which ${whole} wholly in here`]);
  const title = unitTitle(name, names[spot.index]);
  return {
    heading: title,
    where,
    groups: some.slice(0, 8),
    more: some.length - 8,
    speech: `${title}, ${size} ranks, ${ranks}; ${groups.length} groups, ${whole} wholly in here. Enter opens it.`,
    tip: `${names[spot.index]} · ${size.toLocaleString("en")} ranks`,
  };
}

/** Amounts as people say them. */
function amountText(amount, unit) {
  if (unit !== "B")
    return `${amount.toLocaleString("en")} ${amount === 1 ? unit.replace(/s$/, "") : unit}`;
  const names = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];
  let power = 0;
  while (amount >= 1024 && power < names.length - 1) {
    amount /= 1024;
    power += 1;
  }
  return `${power && amount < 10 ? amount.toFixed(1).replace(/\.0$/, "") : Math.round(amount)} ${names[power]}`;
}
