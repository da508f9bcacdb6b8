// Finding a rank by what was typed: "137", "tp=1,dp=3" (some dims are enough), "3>17" in a matrix.

/** Where to go: {spot, text}, or {error} in words. */
function find(picture, typed) {
  const text = typed.trim();
  if (!text) return { error: "" };
  return picture instanceof MatrixPicture ? findPair(picture, text) : findRank(picture, text);
}

function findRank(picture, text) {
  if (/^(rank\s*)?\d+$/i.test(text)) return findNumber(picture, Number(text.replace(/\D/g, "")));
  if (!text.includes("=")) return findUnit(picture, text);
  const grids = picture.isChange ? picture.grids : picture.shownGrids;
  const [named] = grids // "llm tp=3", or "llm enc tp=3" where both are names
    .filter(({ name }) => name && text.startsWith(`${name} `))
    .sort((one, other) => other.name.length - one.name.length);
  const asked = named ? text.slice(named.name.length) : text;
  const searched = named ? [named] : grids;
  const known = [...new Set(searched.flatMap(({ dims }) => dims))];
  const every = searched.map((grid) => findCoordinates(picture, grid, asked, known));
  return every.find(({ spot }) => spot) ?? every.find(({ isForeign }) => !isForeign) ?? every[0];
}

function findNumber(picture, rank) {
  const { world } = picture;
  const slot = world.slotOf(rank);
  if (slot >= 0) return { spot: cellSpot(picture, slot), text: `rank ${rank}` };
  const [first, last] = [world.rankAt(0), world.rankAt(world.size - 1)];
  const between = world.list ? `${world.size}, from ${first} to ${last}` : `${first}…${last}`;
  return { error: `no rank ${rank}; there are ${between}` };
}

function findCoordinates(picture, grid, text, known) {
  const coords = grid.shape.map(() => 0);
  const named = new Set();
  for (const part of text.split(/[,;\s]+/).filter(Boolean)) {
    const [, dim, digits] = part.match(/^(.+)=(-?\d+)$/) ?? [];
    const axis = grid.dims.indexOf(dim);
    if (dim === undefined) return { error: `"${part}" is not like tp=1` };
    if (axis < 0)
      return { error: `no dim ${dim}; there are ${known.join(", ")}`, isForeign: true };
    if (named.has(dim)) return { error: `${dim} comes twice` };
    if (Number(digits) < 0 || Number(digits) >= grid.shape[axis]) {
      return { error: `${dim} is 0…${grid.shape[axis] - 1}, not ${digits}` };
    }
    coords[axis] = Number(digits);
    named.add(dim);
  }
  const rank = grid.rankAt(coords);
  const free = grid.dims.filter((dim, axis) => !named.has(dim) && grid.shape[axis] > 1);
  const others = free.length ? `, the first with ${free.join(", ")} 0` : "";
  const pane = picture.isChange ? picture.grids.indexOf(grid) : 0;
  const spot = cellSpot(picture, picture.world.slotOf(rank), pane);
  return { spot, text: `rank ${rank}${others}` };
}

function cellSpot(picture, index, pane = 0) {
  return { pane: picture.panes[pane], level: CELL, index };
}

/** A host or another unit by its name, or by the end of it. */
function findUnit(picture, text) {
  const wanted = text.toLowerCase();
  for (const match of [
    (name) => name === wanted,
    (name) => name.endsWith(wanted),
    (name) => name.includes(wanted),
  ]) {
    for (const [level, { name, names }] of picture.levels.entries()) {
      const index = names.findIndex((each) => match(each.toLowerCase()));
      if (index >= 0)
        return { spot: { pane: picture.panes[0], level, index }, text: `${name} ${names[index]}` };
    }
  }
  return { error: `"${text}" is no rank, no coordinates like ${example(picture)}, and no host` };
}

function example(picture) {
  const grid = picture.shownGrids[0];
  return grid.dims
    .slice(0, 2)
    .map((dim, axis) => `${dim}=${grid.shape[axis] - 1}`)
    .join(",");
}

function findPair(picture, text) {
  const ends = text.split(/\s*(?:>|→|,|\s|to)\s*/).filter(Boolean);
  const hint = `try ${picture.sources[0]}>${picture.targets[0]}`;
  const wrong = ends.find((each) => !/^\d+$/.test(each));
  if (wrong !== undefined) return { error: `"${wrong}" is no rank; ${hint}` };
  if (ends.length < 1 || ends.length > 2)
    return { error: `"${text}" is no pair of ranks; ${hint}` };
  const [source, target] = ends.map(Number);
  const row = picture.rowOf.get(source);
  if (row === undefined) return { error: `rank ${source} sends nothing here; ${hint}` };
  if (target !== undefined && !picture.columnOf.has(target))
    return { error: `rank ${target} receives nothing here` };
  let column = picture.columnOf.get(target);
  for (let each = 0; column === undefined && each < picture.width; each++) {
    if (picture.cells.has(row * picture.width + each)) column = each;
  }
  return {
    spot: { row, column: column ?? 0, bin: 1, level: CELL, index: 0 },
    text: `${source} → ${picture.targets[column ?? 0]}`,
  };
}
