// Drawing a CellPicture on a canvas: frames, cells, units that stand for their ranks, what is lit.

const VEIL = 0.76; // how far what is not lit fades

function paintCells(pen, view, picture) {
  for (const { level, list } of picture.shown.outer) {
    for (const unit of list) paintFrame(pen, view, picture, level, unit);
  }
  for (const index of picture.shown.list) paintSpot(pen, view, picture, index);
}

function pixels(view, box) {
  const x = view.toX(box.x);
  const y = view.toY(box.y);
  return { x, y, width: box.width * view.scale, height: box.height * view.scale };
}

function paintFrame({ ctx, theme }, view, picture, level, unit) {
  const { x, y, width, height } = pixels(view, picture.boxes.box(level, unit));
  const { header, pad } = picture.boxes.frames[level];
  const radius = Math.min(10, (pad + 0.1) * view.scale * 1.4);
  ctx.beginPath();
  ctx.roundRect(x, y, width, height, radius);
  ctx.fillStyle = level % 2 ? theme.paper : theme.frame;
  ctx.fill();
  ctx.strokeStyle = theme.edge;
  ctx.lineWidth = level ? 1.5 : 1;
  ctx.stroke();
  const size = Math.min(header * view.scale * 0.82, level ? 18 : 15);
  if (size < 7.5) return;
  const left = x + pad * view.scale + 1;
  const isStrong = level > 0 || picture.levels[level].name === "module";
  ctx.font = `${isStrong ? 600 : 500} ${size}px ${theme.font}`;
  ctx.fillStyle = isStrong ? theme.ink : theme.faint;
  ctx.textAlign = "left";
  ctx.textBaseline = "middle";
  const room = width - 2 * pad * view.scale;
  ctx.fillText(
    fitting(ctx, picture.levels[level], unit, room),
    left,
    y + (pad + header * 0.62) * view.scale * 0.86,
  );
}

/** A unit's name, or where that of some unit is too long what tells them apart, or nothing. */
function fitting(ctx, level, unit, room) {
  const name = level.names[unit];
  const areAllShort =
    level.longest <= name.length || ctx.measureText("0".repeat(level.longest)).width <= room;
  if (areAllShort && ctx.measureText(name).width <= room) return name;
  const short = level.short(name);
  return shortened(ctx, short, room) || shortened(ctx, short.replace(/…$/, ""), room);
}

/** The text, with its middle left out where it is too long; nothing where that says too little. */
function shortened(ctx, text, room) {
  if (ctx.measureText(text).width <= room) return text;
  for (let keep = Math.min(text.length, 40) - 1; keep > 4; keep--) {
    const short = `${text.slice(0, Math.floor(keep / 3))}…${text.slice(-Math.ceil((keep * 2) / 3))}`;
    if (ctx.measureText(short).width <= room) return short;
  }
  return "";
}

function paintSpot(pen, view, picture, index) {
  if (picture.shown.level === CELL) paintCell(pen, view, picture, index);
  else paintUnit(pen, view, picture, index);
}

function paintCell({ ctx, theme }, view, picture, slot) {
  const { x, y, width: side } = pixels(view, picture.boxes.box(CELL, slot));
  const rim = side > 9 ? Math.max(1, side * 0.04) : side * 0.06;
  const inner = side - 2 * rim;
  const group = picture.colouring.groupOf[slot];
  if (group === SPARE) {
    paintSpare(ctx, theme, x + rim, y + rim, inner, inner);
  } else {
    ctx.fillStyle = group === PLAIN ? theme.plain : picture.colouring.fill(group);
    if (side < 12) {
      ctx.fillRect(x + rim, y + rim, inner, inner);
    } else {
      ctx.beginPath();
      ctx.roundRect(x + rim, y + rim, inner, inner, Math.min(5, side * 0.12));
      ctx.fill();
    }
  }
  if (side < 10) return;
  ctx.textAlign = "center";
  ctx.textBaseline = "middle";
  ctx.fillStyle = group < 0 ? theme.ink : INK_ON_FILL;
  const rank = String(picture.world.rankAt(slot));
  const sign = group < 0 ? "" : picture.colouring.sign(group);
  const middle = x + side / 2;
  if (side >= 30) {
    write(ctx, theme, rank, middle, y + side * (sign ? 0.4 : 0.5), inner * 0.78, side * 0.36, 600);
    write(ctx, theme, sign, middle, y + side * 0.74, inner * 0.86, side * 0.24, 400);
  } else {
    write(
      ctx,
      theme,
      group < 0 ? "" : picture.colouring.short(group),
      middle,
      y + side / 2 + 0.5,
      inner * 0.9,
      side * 0.5,
      500,
    );
  }
}

/** Text as large as the room allows, up to a size; none where that would be too small to read. */
function write(ctx, theme, text, x, y, room, largest, weight) {
  const size = Math.min(largest, 26, room / (text.length * 0.58));
  if (size < 6) return;
  ctx.font = `${weight} ${Math.round(size * 2) / 2}px ${theme.font}`;
  ctx.fillText(text, x, y);
}

/** A place without a group: an outline, so that it is no colour. */
function paintSpare(ctx, theme, x, y, width, height) {
  if (width < 4) {
    ctx.fillStyle = theme.spare;
    ctx.fillRect(x, y, width, height);
    return;
  }
  ctx.strokeStyle = theme.spare;
  ctx.lineWidth = 1;
  ctx.strokeRect(x + 0.5, y + 0.5, width - 1, height - 1);
  if (width < 14) return;
  ctx.beginPath();
  ctx.moveTo(x + 1, y + height - 1);
  ctx.lineTo(x + width - 1, y + 1);
  ctx.stroke();
}

/** A host or domain that stands for its ranks: a stripe for each group, grey where they are many. */
function paintUnit({ ctx, theme }, view, picture, unit) {
  const { level } = picture.shown;
  const { x, y, width, height } = pixels(view, picture.boxes.box(level, unit));
  const rim = width > 10 ? 1 : 0.4;
  const [left, top, inner, tall] = [x + rim, y + rim, width - 2 * rim, height - 2 * rim];
  const held = picture.held(level, unit);
  const groups = [...held.keys()].filter((group) => group >= 0);
  let total = 0;
  for (const count of held.values()) total += count;
  ctx.save();
  ctx.beginPath();
  if (width > 14) ctx.roundRect(left, top, inner, tall, Math.min(5, width * 0.08));
  else ctx.rect(left, top, inner, tall);
  ctx.fillStyle = theme.frame;
  ctx.fill();
  if (groups.length > 1 && inner / groups.length < 5) {
    ctx.fillStyle = theme.palette.mixed;
    ctx.fill();
  } else if (groups.length) {
    ctx.clip();
    let from = left;
    for (const group of groups) {
      const share = (held.get(group) / total) * inner;
      ctx.fillStyle = picture.colouring.fill(group);
      ctx.fillRect(from, top, share + 0.5, tall);
      from += share;
    }
  }
  ctx.restore();
  if (inner > 5 && picture.isLeft(level, unit))
    paintWedge(ctx, left + inner, top + tall, Math.min(tall, inner) * 0.38);
  if (!groups.length && held.has(SPARE)) paintSpare(ctx, theme, left, top, inner, tall);
  if (tall < 15 || inner < 24) return;
  ctx.fillStyle = groups.length ? INK_ON_FILL : theme.faint;
  ctx.textAlign = "center";
  ctx.textBaseline = "middle";
  const middle = x + width / 2;
  const many = groups.length === 1 ? picture.colouring.sign(groups[0]) : `${groups.length} groups`;
  if (tall < 30) {
    ctx.font = `500 ${Math.min(12, tall * 0.5)}px ${theme.font}`;
    ctx.fillText(fitting(ctx, picture.levels[level], unit, inner * 0.92), middle, y + height / 2);
    return;
  }
  ctx.font = `600 ${Math.min(15, tall * 0.26)}px ${theme.font}`;
  ctx.fillText(fitting(ctx, picture.levels[level], unit, inner * 0.92), middle, y + height * 0.36);
  write(
    ctx,
    theme,
    groups.length ? many : "no group",
    middle,
    y + height * 0.68,
    inner * 0.9,
    Math.min(13, tall * 0.22),
    400,
  );
}

/** A dark corner, at the right below: a group goes on elsewhere. */
function paintWedge(ctx, right, bottom, size) {
  const side = Math.min(size, 12);
  ctx.fillStyle = INK_ON_FILL;
  ctx.beginPath();
  ctx.moveTo(right, bottom - side);
  ctx.lineTo(right, bottom);
  ctx.lineTo(right - side, bottom);
  ctx.fill();
}

/** Draw again what is lit, with an outline, over what has faded. */
function lightUp(pen, view, picture, spots) {
  const { ctx, theme } = pen;
  const { left, right, top, bottom } = view.seen;
  for (const index of spots) {
    const box = picture.boxes.box(picture.shown.level, index);
    if (box.x > right || box.y > bottom || box.x + box.width < left || box.y + box.height < top)
      continue;
    paintSpot(pen, view, picture, index);
    if (picture.shown.level !== CELL) continue;
    outline(ctx, view, box, theme.ink, Math.min(2, box.width * view.scale * 0.12), 0);
  }
}

function veil({ ctx, theme }, view) {
  ctx.globalAlpha = VEIL;
  ctx.fillStyle = theme.paper;
  ctx.fillRect(0, 0, view.windowWidth, view.windowHeight);
  ctx.globalAlpha = 1;
}

function outline(ctx, view, box, colour, width, away) {
  const { x, y, width: wide, height: tall } = pixels(view, box);
  ctx.strokeStyle = colour;
  ctx.lineWidth = width;
  ctx.beginPath();
  const small = Math.min(wide, tall);
  ctx.roundRect(
    x - away,
    y - away,
    wide + 2 * away,
    tall + 2 * away,
    small > 14 ? 5 : Math.max(0, away),
  );
  ctx.stroke();
}

/** A thin dashed outline around the rank's other groups, which the lit dims do not make. */
function ringOthers({ ctx, theme }, view, picture, slots) {
  ctx.setLineDash([3, 2]);
  for (const slot of slots) {
    if (slot >= 0) outline(ctx, view, picture.boxes.box(CELL, slot), theme.ink, 1.2, -1);
  }
  ctx.setLineDash([]);
}
