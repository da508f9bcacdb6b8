// Frames where no topology is known: the modules of a set, and blocks of the dims that vary fastest.

const LARGEST_BLOCK = 64;

/** Levels, innermost first, as a topology has them. */
function blocksOf(grids, world) {
  const levels = [];
  if (world.size > 128) {
    const inner = blockLevel(grids, world, LARGEST_BLOCK);
    levels.push(inner);
    if (inner.names.length > 512)
      levels.push({ ...blockLevel(grids, world, LARGEST_BLOCK ** 2), name: "large block" });
  }
  if (grids.length > 1 && areDisjoint(grids, world)) levels.push(moduleLevel(grids, world));
  return levels;
}

function areDisjoint(grids, world) {
  const taken = new Uint8Array(world.size);
  for (const grid of grids) {
    for (const rank of grid.ranks()) {
      const slot = world.slotOf(rank);
      if (taken[slot]) return false;
      taken[slot] = 1;
    }
  }
  return true;
}

function moduleLevel(grids, world) {
  const of = new Int32Array(world.size).fill(-1);
  grids.forEach((grid, index) => {
    for (const rank of grid.ranks()) of[world.slotOf(rank)] = index;
  });
  return { name: "module", of, names: grids.map((grid) => grid.name || grid.title), isGuess: true };
}

/** Blocks of at most so many positions, ended by a dim where one ends there. */
function blockLevel(grids, world, most) {
  const of = new Int32Array(world.size).fill(-1);
  const bounds = [];
  for (const grid of grids) {
    let size = 1;
    let product = 1;
    for (const each of grid.shape) {
      product *= each;
      if (product <= most) size = product;
    }
    if (size < most / 8) size = Math.min(most, grid.size); // no dim ends near: blocks of even size
    grid.ranks().forEach((rank, position) => {
      const slot = world.slotOf(rank);
      if (of[slot] >= 0) return;
      if (position % size === 0 || !bounds.length || bounds.at(-1).grid !== grid) {
        bounds.push({ grid, low: rank, high: rank });
      }
      const bound = bounds.at(-1);
      bound.low = Math.min(bound.low, rank);
      bound.high = Math.max(bound.high, rank);
      of[slot] = bounds.length - 1;
    });
  }
  return {
    name: "block",
    of,
    names: bounds.map(({ low, high }) => `${low}…${high}`),
    isGuess: true,
  };
}

/** More levels around the outermost one, for as long as it has more units than can be seen at once. */
function crowded(levels) {
  const known = [...levels];
  while (known.length && known.at(-1).names.length > MOST_SEEN) {
    const { of, names, name, isGuess } = known.at(-1);
    const starts = [];
    for (let unit = 0; unit < names.length; unit += LARGEST_BLOCK) starts.push(unit);
    const ends = starts.map((unit) => Math.min(unit + LARGEST_BLOCK, names.length) - 1);
    known.push({
      name: isGuess ? `larger ${name}` : `${LARGEST_BLOCK} ${plural(name)}`,
      of: of.map((unit) => Math.floor(unit / LARGEST_BLOCK)),
      names: starts.map(
        (unit, i) => `${names[unit].split("…")[0]}…${names[ends[i]].split("…").at(-1)}`,
      ),
      isGuess: true,
    });
  }
  for (const level of known) {
    level.short = shortener(level);
    level.longest = level.names.reduce((most, one) => Math.max(most, one.length), 0);
  }
  return known;
}

/** What is left of a unit's name in little room: without what all names of its level begin with. */
function shortener({ names, isGuess }) {
  let common = names[0] ?? "";
  for (const name of names) {
    while (!name.startsWith(common)) common = common.slice(0, -1);
  }
  const length = common.replace(/\d+$/, "").length;
  const from = (name) => (isGuess && name.includes("…") ? `${name.split("…")[0]}…` : name);
  return (name) => from(name).slice(length) || name;
}

/** Give slots that no unit holds a unit of their own. */
function complete(level, world) {
  const of = new Int32Array(world.size).fill(-1);
  for (let slot = 0; slot < of.length; slot++)
    of[slot] = level.isGuess ? level.of[slot] : (level.of[world.rankAt(slot)] ?? -1);
  let isWhole = true;
  const spare = level.names.length;
  for (let slot = 0; slot < of.length; slot++) {
    if (of[slot] >= 0) continue;
    of[slot] = spare;
    isWhole = false;
  }
  const names = isWhole ? level.names : [...level.names, `no ${level.name}`];
  return { ...level, of, names };
}
