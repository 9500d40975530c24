//! A registration: what is accepted is listed in full and as it was sent, in a form that no client chokes on.

use openclaw_mcp_proxy::proxy::session::{Registration, ToolSet};
use serde_json::{Map, Value, json};

use super::world::TOOL_LIMITS;
use super::{DEPTH, depth, json, oracle};

/// Checks one registration, or one list of tools.
pub fn check(data: &[u8]) {
    let Ok(text) = std::str::from_utf8(data) else { return };
    let value = oracle(text);
    if text.trim_start().starts_with('[') {
        match ToolSet::parse(text, &TOOL_LIMITS) {
            Ok(tools) => listed(&tools, &value.expect("what is accepted is JSON")),
            Err(rejected) => refused(&rejected.detail),
        }
        return;
    }
    match Registration::parse(text, &TOOL_LIMITS) {
        Ok(registration) => {
            let value = value.expect("what is accepted is JSON");
            assert!(depth(&value) <= DEPTH);
            let named = |value: &Value, names: [&str; 2]| names.map(|name| value[name].clone());
            assert!(named(&value, ["device_id", "deviceId"]).contains(&Value::from(registration.device_id)));
            let name = registration.device_name.map_or(Value::Null, Value::from);
            assert!(named(&value, ["device_name", "deviceName"]).contains(&name));
            let none = json!([]);
            listed(&registration.tools, if value["tools"].is_null() { &none } else { &value["tools"] });
        }
        Err(rejected) => refused(&rejected.detail),
    }
}

/// A sentence that can be shown and logged.
fn refused(error: &str) {
    assert!(error.ends_with('.'), "{error:?}");
    assert!(!error.chars().any(|c| c.is_control() || matches!(c, '\u{202a}'..='\u{202e}')), "{error:?}");
    assert!(error.len() < 2000, "{} bytes", error.len());
}

fn listed(tools: &ToolSet, given: &Value) {
    let given = given.as_array().expect("tools are an array");
    let (legacy, modern) = (json(tools.legacy_list()), json(tools.modern_list()));
    let (legacy, modern) = (legacy.as_array().expect("an array"), modern.as_array().expect("an array"));
    assert_eq!((legacy.len(), modern.len(), tools.len()), (given.len(), given.len(), given.len()));
    for ((given, legacy), modern) in given.iter().zip(legacy).zip(modern) {
        let name = given["name"].as_str().expect("a tool has a name");
        let tool = tools.get(name).expect("it is found by its name");
        for shown in [legacy, modern] {
            assert_eq!(shown["name"], name);
            assert!(shown["description"].is_string());
            let schema = either(given, ["input_schema", "inputSchema"]);
            assert_eq!(shown["inputSchema"], explicit(schema));
            for member in ["title", "annotations", "icons", "_meta"] {
                assert_eq!(shown[member], given[member], "{member}");
            }
        }
        assert_eq!(modern["outputSchema"], *either(given, ["output_schema", "outputSchema"]));
        // Older clients drop the whole list for one that is no object.
        assert!(legacy["outputSchema"].is_null() || legacy["outputSchema"]["type"] == "object");
        let mut headers = Vec::new();
        annotated(&modern["inputSchema"], &mut |header, arguments| {
            assert!(http::HeaderName::from_bytes(header.as_bytes()).is_ok_and(|name| name == header));
            let arguments = arguments.to_string();
            assert_eq!(tool.param_headers.values(&arguments).expect("it is given once").get(header), Some(&"1"));
            headers.push(header.to_owned());
        });
        headers.sort();
        headers.dedup();
        assert_eq!(headers.len(), tool.param_headers.len());
        for schema in [&modern["inputSchema"], &modern["outputSchema"]] {
            leads_nowhere_else(schema);
        }
    }
}

/// The header of each annotated property, and arguments that give it the value 1.
fn annotated(schema: &Value, each: &mut dyn FnMut(&str, Value)) {
    for (name, property) in schema["properties"].as_object().into_iter().flatten() {
        if let Some(header) = property["x-mcp-header"].as_str() {
            each(&format!("mcp-param-{}", header.to_ascii_lowercase()), json!({ name: 1 }));
        }
        annotated(property, &mut |header, value| each(header, json!({ name: value })));
    }
}

fn either<'a>(value: &'a Value, names: [&str; 2]) -> &'a Value {
    let [first, second] = names.map(|name| &value[name]);
    if first.is_null() { second } else { first }
}

/// The schema with the type that its root must have.
fn explicit(schema: &Value) -> Value {
    let mut schema = schema.as_object().cloned().unwrap_or_default();
    if schema.is_empty() {
        schema.insert("properties".to_owned(), Map::new().into());
    }
    schema.entry("type").or_insert("object".into());
    assert_eq!(schema["type"], "object");
    schema.into()
}

/// No reference of the root schema, or of a schema in its `properties`, `items` or `$defs`, is a URL.
fn leads_nowhere_else(schema: &Value) {
    let Some(schema) = schema.as_object() else { return };
    if let Some(reference) = schema.get("$ref") {
        assert!(reference.as_str().is_some_and(|reference| reference.starts_with('#')), "{reference}");
    }
    for name in ["properties", "$defs"] {
        schema.get(name).and_then(Value::as_object).into_iter().flat_map(Map::values).for_each(leads_nowhere_else);
    }
    schema.get("items").into_iter().for_each(leads_nowhere_else);
}
