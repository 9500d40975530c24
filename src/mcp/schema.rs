//! JSON Schemas of tools, as far as the proxy must understand them: `x-mcp-header`, to which MCP gives a meaning,
//! references that lead out of the schema, and what makes clients throw a whole list of tools away.
//!
//! Servers refuse a tool whose annotation breaks the rules, and clients over HTTP leave such a tool out; both find
//! the annotations here (2026-07-28, Streamable HTTP, "Custom Headers from Tool Parameters").

use std::collections::HashSet;

use serde_json::{Map, Value};

use super::headers::ParamHeaders;

/// One keyword of a schema, or of a schema within it.
#[derive(Debug, Clone, Copy)]
pub struct Keyword<'a> {
    /// Its name.
    pub name: &'a str,
    /// Its value.
    pub value: &'a Value,
    /// The schema that it belongs to.
    schema: &'a Map<String, Value>,
    /// Whether that is the schema of an argument, or of one within an argument: reached through `properties` alone.
    is_argument: bool,
}

/// Calls `each` for every keyword of `schema` and of the schemas within it.
///
/// # Errors
/// The first error of `each`.
pub fn walk(schema: &Value, each: &mut impl FnMut(Keyword<'_>) -> Result<(), String>) -> Result<(), String> {
    walk_from(schema, Place::Root, each)
}

/// Where a schema is.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Place {
    Root,
    /// Reached through `properties` alone.
    Argument,
    Elsewhere,
}

fn walk_from(
    schema: &Value,
    place: Place,
    each: &mut impl FnMut(Keyword<'_>) -> Result<(), String>,
) -> Result<(), String> {
    let object = match schema {
        Value::Object(object) => object,
        Value::Array(schemas) => {
            return schemas.iter().try_for_each(|schema| walk_from(schema, Place::Elsewhere, each));
        }
        _ => return Ok(()),
    };
    for (name, value) in object {
        each(Keyword { name, value, schema: object, is_argument: place == Place::Argument })?;
        match name.as_str() {
            "properties" => {
                let below = if place == Place::Elsewhere { place } else { Place::Argument };
                for property in value.as_object().into_iter().flat_map(Map::values) {
                    walk_from(property, below, each)?;
                }
            }
            // Their keys are names, not keywords.
            "patternProperties" | "$defs" | "definitions" | "dependentSchemas" => {
                for schema in value.as_object().into_iter().flat_map(Map::values) {
                    walk_from(schema, Place::Elsewhere, each)?;
                }
            }
            "items"
            | "prefixItems"
            | "additionalItems"
            | "unevaluatedItems"
            | "contains"
            | "additionalProperties"
            | "unevaluatedProperties"
            | "propertyNames"
            | "anyOf"
            | "oneOf"
            | "allOf"
            | "not"
            | "if"
            | "then"
            | "else"
            | "contentSchema" => walk_from(value, Place::Elsewhere, each)?,
            // Data, or a keyword that nobody knows.
            _ => {}
        }
    }
    Ok(())
}

/// Checks a schema that an app registers, and finds the arguments that clients repeat in headers.
///
/// # Errors
/// A sentence for the tool's developer. A reference must lead to a place within the schema, for nothing is ever
/// fetched; types must exist, for clients that compile the schema drop every tool otherwise.
pub fn check(schema: &Value) -> Result<ParamHeaders, String> {
    let mut headers = HashSet::new();
    let mut names = HashSet::new();
    let mut has_own_base = false;
    walk(schema, &mut |keyword| {
        match keyword.name {
            "$anchor" | "$dynamicAnchor" => names.extend(keyword.value.as_str().map(str::to_owned)),
            // References below it are relative to it.
            "$id" | "id" => has_own_base |= keyword.value.is_string(),
            _ => {}
        }
        Ok(())
    })?;
    walk(schema, &mut |keyword| {
        let value = keyword.value;
        match keyword.name {
            "$ref" | "$dynamicRef" | "$recursiveRef" => {
                let Some(target) = value.as_str().and_then(|target| target.strip_prefix('#')) else {
                    return Err(format!("{}: only references within the schema ('#…') are allowed.", keyword.name));
                };
                let leads_somewhere = has_own_base
                    || target.is_empty()
                    || names.contains(target)
                    || schema.pointer(target).is_some()
                    || target.contains('%');
                if !leads_somewhere {
                    return Err(format!("{}: it leads to no place in the schema.", keyword.name));
                }
            }
            "$schema" if !value.is_string() => return Err("$schema: a string is required.".into()),
            "type" => {
                let is_type = |value: &Value| value.as_str().is_some_and(|name| TYPES.contains(&name));
                let types = value.as_array().map_or(std::slice::from_ref(value), Vec::as_slice);
                if types.is_empty() || !types.iter().all(is_type) {
                    return Err(format!("type: one or more of {} are required.", TYPES.join(", ")));
                }
            }
            _ => {}
        }
        keyword.check_param_header(&mut headers)
    })?;
    Ok(ParamHeaders::of(schema))
}

/// The types of JSON Schema.
const TYPES: [&str; 7] = ["object", "array", "string", "number", "integer", "boolean", "null"];

impl Keyword<'_> {
    /// Checks this keyword, if it is `x-mcp-header`, and adds its header to those `taken` before it.
    ///
    /// # Errors
    /// A sentence for the tool's developer, if it breaks the rules.
    fn check_param_header(&self, taken: &mut HashSet<String>) -> Result<(), String> {
        if self.name != "x-mcp-header" {
            return Ok(());
        }
        let invalid = |why: &str| Err(format!("x-mcp-header: {why}"));
        if !self.is_argument {
            return invalid("is only allowed on properties that are reached through 'properties' alone.");
        };
        let is_token = |c: char| c.is_ascii_alphanumeric() || "!#$%&'*+-.^_`|~".contains(c);
        let Some(name) = self.value.as_str().filter(|name| !name.is_empty() && name.chars().all(is_token)) else {
            return invalid("must be a non-empty HTTP field name.");
        };
        if !matches!(self.schema.get("type").and_then(Value::as_str), Some("string" | "integer" | "boolean")) {
            return invalid("is only allowed on a property of type string, integer or boolean.");
        }
        if !taken.insert(name.to_ascii_lowercase()) {
            return invalid("must be unique, whatever the case of its letters.");
        }
        Ok(())
    }
}

/// The arguments that clients repeat in headers.
///
/// # Errors
/// A sentence for the tool's developer, if an annotation breaks the rules.
pub fn param_headers(schema: &Value) -> Result<ParamHeaders, String> {
    let mut headers = HashSet::new();
    walk(schema, &mut |keyword| keyword.check_param_header(&mut headers))?;
    Ok(ParamHeaders::of(schema))
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn what_leads_nowhere_or_is_no_type_is_refused() {
        for good in [
            json!({ "$ref": "#" }),
            json!({ "$ref": "#/$defs/a", "$defs": { "a": {} } }),
            json!({ "$ref": "#a", "$defs": { "a": { "$anchor": "a" } } }),
            json!({ "items": { "$id": "x:y", "$ref": "#/z" } }),
            json!({ "type": ["string", "null"], "x-vendor": { "type": "widget", "$ref": "http://x/" } }),
            json!({ "properties": { "$ref": { "type": "string" } }, "const": { "$ref": "http://x/" } }),
        ] {
            assert_eq!(check(&good), Ok(ParamHeaders::default()), "{good}");
        }
        for (bad, says) in [
            (json!({ "$ref": "http://127.0.0.1:9/" }), "$ref"),
            (json!({ "items": { "$ref": "other.json" } }), "$ref"),
            (json!({ "$ref": "#/$defs/a" }), "no place"),
            (json!({ "$ref": 7 }), "$ref"),
            (json!({ "properties": { "a": { "type": "nope" } } }), "type"),
            (json!({ "type": [] }), "type"),
            (json!({ "$schema": 5 }), "$schema"),
        ] {
            assert!(check(&bad).unwrap_err().contains(says), "{bad}");
        }
    }

    #[test]
    fn annotations_are_found_through_properties_alone() {
        let property = json!({ "type": "string", "x-mcp-header": "Region" });
        let found = param_headers(&json!({ "properties": { "o": { "properties": { "r": property } } } }));
        let found = found.unwrap();
        let values = found.values(r#"{"o":{"r":"x"}}"#).unwrap();
        assert_eq!((found.len(), values.get("mcp-param-region")), (1, Some(&r#""x""#)));
        for elsewhere in [
            json!({ "x-mcp-header": "Region", "type": "string" }),
            json!({ "items": property }),
            json!({ "properties": { "r": { "anyOf": [property] } } }),
            json!({ "$defs": { "r": property } }),
        ] {
            assert!(param_headers(&elsewhere).is_err(), "{elsewhere}");
        }
        let data = json!({ "properties": { "x-mcp-header": { "type": "string" } }, "default": property });
        assert_eq!(param_headers(&data), Ok(ParamHeaders::default()));
    }
}
