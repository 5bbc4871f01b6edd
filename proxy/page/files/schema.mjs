// Writes the schemas of an OpenAPI document as people read them: {rollout_id: string, reward?: number | null}.

const DEEPEST = 6; // schemas in schemas, before only their name is written

const nameOf = (ref) => ref.slice(ref.lastIndexOf("/") + 1);

export function written(schema, document, indent = "", depth = 0) {
  if (!schema || schema === true) return "any";
  if (schema.$ref) {
    const named = document.components.schemas[nameOf(schema.$ref)];
    return depth < DEEPEST ? written(named, document, indent, depth + 1) : nameOf(schema.$ref);
  }
  if (schema.enum) return schema.enum.map((value) => JSON.stringify(value)).join(" | ");
  if ("const" in schema) return JSON.stringify(schema.const);
  const several = schema.anyOf ?? schema.oneOf ?? schema.allOf;
  if (several) return several.map((one) => written(one, document, indent, depth)).join(schema.allOf ? " & " : " | ");
  if (schema.type === "array") return `[${written(schema.items, document, indent, depth)}, …]`;
  if (schema.properties) return fields(schema, document, indent, depth);
  if (schema.type === "object") return `{…: ${written(schema.additionalProperties, document, indent, depth)}}`;
  return `${schema.type ?? "any"}${bounds(schema)}`;
}

function fields(schema, document, indent, depth) {
  const deeper = `${indent}  `;
  const lines = Object.entries(schema.properties).map(([name, one]) => {
    const optional = schema.required?.includes(name) ? "" : "?";
    return `${deeper}${name}${optional}: ${written(one, document, deeper, depth)}`;
  });
  return `{\n${lines.join(",\n")}\n${indent}}`;
}

function bounds(schema) {
  const said = [
    [schema.minimum, "from"],
    [schema.maximum, "to"],
    [schema.exclusiveMinimum, "over"],
    [schema.exclusiveMaximum, "under"],
    [schema.minLength, "characters from"],
    [schema.maxLength, "characters to"],
    [schema.pattern, "like"],
  ].filter(([value]) => value !== undefined);
  return said.length ? ` (${said.map(([value, word]) => `${word} ${value}`).join(", ")})` : "";
}
