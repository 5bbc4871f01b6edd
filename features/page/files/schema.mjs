// Writes the schemas of an OpenAPI document as people read them: {rollout_id: string, reward?: number | null}.

const nameOf = (ref) => ref.slice(ref.lastIndexOf("/") + 1);

// `inside`: the names of the schemas that this one stands in, or that were written before it.
export function written(schema, document, indent = "", inside = new Set()) {
  if (!schema || schema === true) return "any";
  if (schema.$ref) {
    const name = nameOf(schema.$ref);
    if (inside.has(name)) return `${name} (see above)`;
    return written(document.components.schemas[name], document, indent, inside.add(name));
  }
  if (schema.enum) return schema.enum.map((value) => JSON.stringify(value)).join(" | ");
  if ("const" in schema) return JSON.stringify(schema.const);
  const several = schema.anyOf ?? schema.oneOf ?? schema.allOf;
  if (several) return several.map((one) => written(one, document, indent, inside)).join(schema.allOf ? " & " : " | ");
  if (schema.type === "array") return `[${written(schema.items, document, indent, inside)}, …]`;
  if (schema.properties) return fields(schema, document, indent, inside);
  if (schema.type === "object") return `{…: ${written(schema.additionalProperties, document, indent, inside)}}`;
  return `${schema.type ?? "any"}${bounds(schema)}`;
}

function fields(schema, document, indent, inside) {
  const deeper = `${indent}  `;
  const lines = Object.entries(schema.properties).map(([name, one]) => {
    const optional = schema.required?.includes(name) ? "" : "?";
    return `${deeper}${name}${optional}: ${written(one, document, deeper, inside)}`;
  });
  return `{\n${lines.join(",\n")}\n${indent}}`;
}

function bounds({ minimum, exclusiveMinimum, maximum, minLength, maxLength, pattern }) {
  const limits = [
    range(minimum, maximum),
    exclusiveMinimum !== undefined && `over ${exclusiveMinimum}`,
    range(minLength, maxLength, " characters"),
    pattern,
  ].filter(Boolean);
  return limits.length ? ` (${limits.join(", ")})` : "";
}

function range(least, most, unit = "") {
  if (least === undefined) return most !== undefined && `up to ${most}${unit}`;
  return most === undefined ? `${least}${unit} or more` : `${least} to ${most}${unit}`;
}
