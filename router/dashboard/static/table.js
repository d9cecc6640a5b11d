// A table that is sorted by its headings and, where it is narrow, becomes one card for each row.
import { html, useState } from "./ui.js";

const MAX_ROWS = 250; // that are drawn at once, unless more are asked for

/**
 * Columns: {id, label, about, numeric, broad, value, cell}. `value` of a row is what is sorted by, `cell` what is
 * shown; a broad column takes a line of its own where rows are cards.
 */
export function Table({ name, columns, rows, keyOf, sortedBy, descending = false, chosen, onChoose, empty }) {
  const [sort, setSort] = useState({ id: sortedBy, descending });
  const [showsAll, setShowsAll] = useState(false);
  if (!rows.length) return empty;
  const column = columns.find(({ id }) => id === sort.id) ?? columns[0];
  const sorted = sort.id ? inOrder(rows, column.value, sort.descending) : rows;
  const shown = showsAll ? sorted : sorted.slice(0, MAX_ROWS);
  return html`
    <div class="table-box"><table class=${onChoose ? "choosable" : ""}>
      <caption class="unseen">${name}</caption>
      <thead>
        <tr>
          ${columns.map((each) => html`<${Heading} key=${each.id} column=${each} sort=${sort} setSort=${setSort} />`)}
        </tr>
      </thead>
      <tbody>
        ${shown.map(
          (row) =>
            html`<${Row}
              key=${keyOf(row)}
              id=${keyOf(row)}
              row=${row}
              columns=${columns}
              isChosen=${chosen === keyOf(row)}
              onChoose=${onChoose}
            />`,
        )}
      </tbody>
    </table></div>
    ${
      sorted.length > shown.length &&
      html`<button class="more" onClick=${() => setShowsAll(true)}>Show all ${sorted.length}</button>`
    }
  `;
}

function Heading({ column, sort, setSort }) {
  const isSorted = sort.id === column.id;
  const direction = isSorted ? (sort.descending ? "descending" : "ascending") : "none";
  const turn = () => setSort({ id: column.id, descending: isSorted ? !sort.descending : Boolean(column.numeric) });
  const mark = { ascending: "↑", descending: "↓", none: "" }[direction];
  return html`
    <th scope="col" class=${column.numeric ? "numeric" : ""} aria-sort=${direction} title=${column.about}>
      ${
        column.value
          ? html`<button onClick=${turn}>${column.label}<span class="mark" aria-hidden="true">${mark}</span></button>`
          : column.label
      }
    </th>
  `;
}

function Row({ id, row, columns, isChosen, onChoose }) {
  const [first, ...rest] = columns;
  const choose = onChoose && (() => onChoose(id));
  const label = first.cell(row);
  return html`
    <tr class=${isChosen ? "chosen" : ""} onClick=${choose}>
      <th scope="row">
        ${choose ? html`<button class="link" aria-pressed=${isChosen ? "true" : "false"}>${label}</button>` : label}
      </th>
      ${rest.map(
        (column) =>
          html`<td key=${column.id} data-label=${column.label} class=${kindOf(column)}>
            <span>${column.cell(row)}</span>
          </td>`,
      )}
    </tr>
  `;
}

const kindOf = ({ numeric, broad }) => `${numeric ? "numeric" : ""}${broad ? " broad" : ""}`;

const collator = new Intl.Collator("en", { numeric: true });

function inOrder(rows, value, descending) {
  const sign = descending ? -1 : 1;
  return [...rows].sort((one, other) => sign * compared(value(one), value(other)));
}

function compared(one, other) {
  return typeof one === "string" ? collator.compare(one, other) : (one ?? -Infinity) - (other ?? -Infinity);
}
