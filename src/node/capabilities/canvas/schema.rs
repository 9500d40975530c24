//! The JSON Schemas of the commands' arguments.

use serde_json::{Value, json};

/// The schema of a command's arguments.
pub(super) fn of(command: &str) -> Option<Value> {
    let required = |names: &[&str], properties| (properties, names.iter().map(|name| (*name).to_owned()).collect());
    let (properties, required): (Value, Vec<String>) = match command {
        "canvas.present" => required(&[], present()),
        "canvas.navigate" => required(
            &["url"],
            json!({ "url": { "type": "string", "description": "An absolute http or https URL, without credentials" } }),
        ),
        "canvas.eval" => required(
            &[],
            json!({ "script": { "type": "string", "description": "JavaScript; a promise that it results in is awaited" } }),
        ),
        "canvas.snapshot" => required(&[], snapshot()),
        "canvas.a2ui.push" | "canvas.a2ui.pushJSONL" => required(&[], push()),
        "canvas.hide" | "canvas.a2ui.reset" | "canvas.a2ui.dump" | "canvas.caps" => required(&[], json!({})),
        _ => return None,
    };
    let mut schema = json!({ "type": "object", "properties": properties, "additionalProperties": true });
    if !required.is_empty() {
        schema["required"] = required.into();
    }
    Some(schema)
}

fn present() -> Value {
    json!({
        "url": { "type": "string", "description": "What to show: an http or https URL" },
        "html": { "type": "string", "description": "What to show, if there is no url: a document" },
        "width": { "type": "integer", "default": 800, "minimum": 100, "maximum": 7680 },
        "height": { "type": "integer", "default": 600, "minimum": 100, "maximum": 7680 },
        "x": { "type": "integer", "default": -1, "description": "From the left of the screen; -1 is its centre" },
        "y": { "type": "integer", "default": -1, "description": "From the top of the screen; -1 is its centre" },
        "title": { "type": "string", "default": "Canvas", "description": "For what has no title of its own" },
        "alwaysOnTop": { "type": "boolean", "default": false, "description": "Not heeded: a browser's window cannot be" },
    })
}

fn snapshot() -> Value {
    json!({
        "format": { "type": "string", "enum": ["png", "jpeg"], "default": "png" },
        "maxWidth": { "type": "integer", "default": 1200, "minimum": 32, "maximum": 7680 },
        "quality": { "type": "integer", "default": 80, "minimum": 1, "maximum": 100, "description": "Of jpeg" },
    })
}

fn push() -> Value {
    json!({
        "jsonl": { "type": "string", "description": "A2UI 0.8 messages, one JSON object on each line" },
        "jsonlPath": { "type": "string", "description": "A file with them in the system's temporary folder, instead" },
        "props": { "type": "object", "description": "Told back by canvas.a2ui.dump" },
    })
}
