// The words beside the picture. Names come from users: they are set as text, never as HTML.

/** An element with its attributes and children; strings become text. */
function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === true) element.setAttribute(name, "");
    else if (value !== null && value !== undefined && value !== false)
      element.setAttribute(name, value);
  }
  element.append(...children);
  return element;
}

function byId(id) {
  return document.getElementById(id);
}

function swatch(colour) {
  const box = make("span", { class: "swatch", "aria-hidden": "true" });
  if (colour) box.style.background = colour;
  else box.classList.add("none");
  return box;
}

/** About a spot: its name, where it is, and its groups, the lit ones first. */
function showAbout(about, invitation) {
  const place = byId("about");
  if (!about) {
    place.replaceChildren(
      make("h2", {}, invitation.heading),
      make("p", { class: "faint" }, invitation.text),
      ...invitation.notes.map((note) => make("p", {}, note)),
    );
    return;
  }
  const where = make("dl", { class: "where" });
  for (const [label, text] of about.where)
    where.append(make("dt", {}, label), make("dd", {}, text));
  const groups = about.groups.map(groupItem);
  if (about.more > 0) groups.push(make("li", { class: "faint" }, `and ${about.more} more groups`));
  place.replaceChildren(
    make("h2", {}, about.heading),
    where,
    make("ul", { class: "groups" }, ...groups),
  );
}

function groupItem({ label, number, count, size, ranks, colour, here }) {
  const title = here === undefined ? `group ${number} of ${count.toLocaleString("en")}` : "";
  const note =
    here === undefined
      ? `${size.toLocaleString("en")} ${size === 1 ? "rank" : "ranks"}`
      : `${here.toLocaleString("en")} of ${size.toLocaleString("en")} ranks`;
  const head = make(
    "div",
    { class: "head" },
    swatch(colour),
    make("b", {}, label),
    ` ${title} `,
    make("span", { class: "faint" }, note),
  );
  const rest = size > ranks.length ? " …" : "";
  const item = make("li", colour ? { class: "lit" } : {}, head);
  if (ranks.length) item.append(make("div", { class: "ranks" }, ranks.join(" ") + rest));
  return item;
}

function showLegend(picture) {
  const place = byId("legend");
  if (picture instanceof MatrixPicture) {
    const { amounts } = picture.theme.palette;
    const shades = picture.theme.isDark ? [...amounts].reverse() : amounts;
    const ramp = make("div", { class: "ramp" }, ...shades.map((shade) => swatch(shade)));
    const { bin } = picture;
    const { largest, hasStaying } = picture.bins(bin);
    const ends = make(
      "div",
      { class: "ends" },
      make("span", {}, "little"),
      make("span", {}, amountText(largest, picture.scene.unit)),
    );
    const title = bin > 1 ? `From ${bin} sources to ${bin} targets` : "From a source to a target";
    const { parted } = picture;
    const lines = parted ? [make("p", { class: "faint" }, `Lines part ${plural(parted)}.`)] : [];
    const stays = make("li", {}, swatch(picture.theme.palette.mixed), "stays on its rank");
    const own = hasStaying ? [make("ul", { class: "inline" }, stays)] : [];
    const scale = largest ? [ramp, ends] : [];
    place.replaceChildren(make("h3", {}, title), ...scale, ...own, ...lines);
    return;
  }
  if (picture.isChange) {
    const { results, marks } = picture.theme.palette;
    const items = Object.entries(results).map(([name, colour]) =>
      make("li", {}, swatch(colour), `${marks[name]} ${name}`),
    );
    place.replaceChildren(make("h3", {}, "Groups"), make("ul", { class: "inline" }, ...items));
    return;
  }
  const dims = picture.dimNames.filter((dim) => picture.dims.has(dim)).join("+") || "no dims";
  const { parts } = picture.panes[0].colouring;
  const last = Math.max(...parts.map(({ grid, own }) => grid.groupCount(own))) - 1;
  const fills = picture.theme.palette.fills.slice(0, last + 1);
  const items = fills.map((colour, i) =>
    make("li", {}, swatch(colour), parts.length > 1 ? String(i) : `g${i}`),
  );
  const text =
    last >= fills.length ? `Group 8 has the colour of group 0, and so on, up to ${last}.` : "";
  const many =
    picture.panes[0].shown.level === CELL
      ? []
      : [
          make("li", {}, swatch(picture.theme.palette.mixed), "many"),
          make(
            "li",
            {},
            make("span", { class: "wedge", "aria-hidden": "true" }),
            "a group goes on elsewhere",
          ),
        ];
  const spare = picture.panes[0].colouring.groupOf.includes(SPARE)
    ? [make("li", {}, swatch(null), "spare")]
    : [];
  place.replaceChildren(
    make("h3", {}, `Groups over ${dims}`),
    make("ul", { class: "inline" }, ...items, ...many, ...spare),
    make("p", { class: "faint" }, text),
    make(
      "p",
      { class: "faint" },
      "Dashed: what else the rank pointed at is in a group with, over one dim.",
    ),
  );
}

/** For each level of the machine, how many groups of each pane leave it. */
function showCrossing(picture) {
  const place = byId("crossing");
  place.replaceChildren();
  if (picture instanceof MatrixPicture || picture.isGuess || !picture.groupCount) return;
  const rows = [];
  picture.panes.forEach((pane, i) => {
    pane.levels.forEach(({ name, isGuess }, level) => {
      const { count } = pane.colouring;
      if (!count || isGuess) return;
      const label = picture.panes.length > 1 ? `${name}, ${["before", "after"][i]}` : name;
      rows.push(
        make("dt", {}, label),
        make(
          "dd",
          {},
          `${pane.crossing(level).toLocaleString("en")} of ${count.toLocaleString("en")}`,
        ),
      );
    });
  });
  place.append(make("h3", {}, "Groups that leave a"), make("dl", { class: "where" }, ...rows));
}

function plural(name) {
  if (/(s|x|ch|sh)$/.test(name)) return `${name}es`;
  return name.endsWith("leaf") ? `${name.slice(0, -1)}ves` : `${name}s`;
}

/** Buttons for the dims, with the key of each; one that is on is pressed. */
function showDims(picture, toggle) {
  const place = byId("dims");
  const names = picture instanceof MatrixPicture || picture.isChange ? [] : picture.dimNames;
  place.hidden = names.length === 0;
  place.replaceChildren(
    ...names.map((dim, i) => {
      const sizes = picture.shownGrids
        .filter((grid) => grid.dims.includes(dim))
        .map((grid) => grid.shape[grid.dims.indexOf(dim)]);
      const size = new Set(sizes).size === 1 ? `=${sizes[0]}` : "";
      const button = make(
        "button",
        {
          type: "button",
          "aria-pressed": String(picture.dims.has(dim)),
          title: `${dim} on or off  ${i + 1}`,
        },
        `${dim}${size}`,
      );
      if (i < 9) button.append(make("kbd", { "aria-hidden": "true" }, String(i + 1)));
      button.addEventListener("click", () => toggle(dim));
      return button;
    }),
  );
}

/** Every combination of dims, with how many groups of how many ranks. */
function showCombinations(picture, choose) {
  const grid = picture.grid >= 0 ? picture.shownGrids?.[0] : null;
  const has = Boolean(grid) && !picture.isChange;
  byId("combination-label").hidden = !has;
  if (!has) return;
  const select = byId("combination");
  const now = grid.own(picture.dims).join("+");
  const every = combinations(grid).map((dims) => {
    const own = new Set(dims);
    const name = dims.join("+");
    const text = `${name}   ${grid.groupCount(own).toLocaleString("en")} × ${grid.groupSize(own).toLocaleString("en")}`;
    return make("option", { value: name, selected: name === now }, text);
  });
  const isListed = every.some((option) => option.value === now);
  if (!isListed) every.unshift(make("option", { value: now, selected: true }, now || "none"));
  select.replaceChildren(...every);
  select.onchange = () => choose(select.value.split("+").filter(Boolean));
}

/** The grids of a set as buttons, with arrows for those that send to another. */
function showModules(picture, choose) {
  const place = byId("modules");
  const { scene, grids } = picture;
  place.hidden = scene.kind !== "grid" || grids.length < 2;
  if (place.hidden) return;
  const buttons = grids.map((grid, i) => {
    const button = make(
      "button",
      { type: "button", "aria-pressed": String(picture.grid === i), class: "module" },
      make("span", { class: "letter" }, letterOf(i)),
      make("b", {}, grid.name || `grid ${i}`),
      make("span", {}, grid.title),
      make(
        "span",
        { class: "faint" },
        `${grid.size.toLocaleString("en")} ranks from ${grid.first}`,
      ),
    );
    button.addEventListener("click", () => choose(i));
    return button;
  });
  const items = [];
  if (areDisjoint(grids, picture.world)) {
    const all = make(
      "button",
      { type: "button", "aria-pressed": String(picture.grid < 0), class: "module" },
      make("b", {}, "all"),
    );
    all.addEventListener("click", () => choose(-1));
    items.push(all);
  }
  const isChain = scene.edges.length > 0 && scene.edges.every(([from, to]) => to === from + 1);
  buttons.forEach((button, i) => {
    items.push(button);
    if (isChain && scene.edges.some(([from]) => from === i)) {
      items.push(
        make(
          "span",
          {
            class: "arrow",
            title: `${grids[i].name} sends to ${grids[i + 1].name}`,
            role: "img",
            "aria-label": "sends to",
          },
          "→",
        ),
      );
    }
  });
  if (scene.edges.length && !isChain) {
    items.push(
      make(
        "span",
        { class: "edges" },
        scene.edges.map(([from, to]) => `${grids[from].name} → ${grids[to].name}`).join(",  "),
      ),
    );
  }
  place.replaceChildren(...items);
}

/** What becomes of the groups over each combination of dims: one row is shown in the picture. */
function showChanges(picture, choose) {
  const place = byId("changes");
  place.hidden = !picture.isChange || !picture.scene.changes.length;
  if (place.hidden) return;
  const { results, marks } = picture.theme.palette;
  const rows = picture.scene.changes.map((change, i) => {
    const colour = results[change.result];
    const button = make(
      "button",
      { type: "button", "aria-pressed": String(picture.row === i) },
      swatch(colour ?? picture.theme.palette.mixed),
      make(
        "span",
        { class: "names" },
        `${change.before.join("+") || "–"} → ${change.after.join("+") || "–"}`,
      ),
      make(
        "span",
        { class: "faint" },
        `${change.counts} ${marks[change.result] ?? "±"} ${change.result}${change.result === "partly" ? `, ${change.kept} kept` : ""}`,
      ),
    );
    button.addEventListener("click", () => choose(i));
    return make("li", {}, button);
  });
  place.replaceChildren(
    make("h3", {}, "Groups over, before → after"),
    make("ul", { class: "rows" }, ...rows),
  );
  const chosen = rows[picture.row];
  chosen.parentElement.scrollTop = chosen.offsetTop - chosen.parentElement.offsetTop - 40;
}

function showDetails(picture, choose) {
  const label = byId("detail-label");
  label.hidden = picture instanceof MatrixPicture || !picture.levels.length;
  if (label.hidden) return;
  const options = [
    ["auto", "what fits"],
    [String(CELL), "ranks"],
    ...picture.levels.map(({ name }, level) => [String(level), plural(name)]),
  ];
  const select = byId("detail");
  select.replaceChildren(...options.map(([value, text]) => make("option", { value }, text)));
  select.onchange = () => choose(select.value === "auto" ? "auto" : Number(select.value));
}
