/** Spans in the order of their tree, each with its depth: children after their parent, by start. */
export function inTreeOrder(spans) {
  const children = Map.groupBy(spans, ({ parent }) => parent);
  const ordered = [];
  const visit = (span, depth) => {
    ordered.push({ ...span, depth });
    for (const child of children.get(span.id) ?? []) visit(child, depth + 1);
  };
  for (const root of children.get(null) ?? []) visit(root, 0);
  return ordered;
}
