//! Capabilities and their responses as MCP has them: the `tools` array, and a CallToolResult.

use std::sync::Arc;

use serde_json::Value;

use super::capabilities::{Capability, Image};
use super::descriptions;
use crate::json;

/// The schema of a command that takes anything.
const ANYTHING: &str = r#"{"type":"object","additionalProperties":true,"properties":{}}"#;

/// The text of the `tools` array: the commands that can work now and that are `wanted`.
pub fn tools(capabilities: &[Arc<dyn Capability>], wanted: impl Fn(&str) -> bool) -> String {
    let mut out = b"[".to_vec();
    for capability in capabilities {
        let available = |command: &&str| wanted(command) && capability.is_available(command);
        for command in capability.commands().into_iter().filter(available) {
            if out.len() > 1 {
                out.push(b',');
            }
            push_tool(&mut out, &**capability, command);
        }
    }
    out.push(b']');
    text(out)
}

fn push_tool(out: &mut Vec<u8>, capability: &dyn Capability, command: &str) {
    out.extend_from_slice(b"{\"name\":");
    json::push_string(out, command);
    out.extend_from_slice(b",\"description\":");
    match descriptions::describe(command).or_else(|| capability.description(command)) {
        Some(description) => json::push_string(out, description),
        None => json::push_string(out, &format!("{} capability: {command}", capability.category())),
    }
    out.extend_from_slice(b",\"inputSchema\":");
    let schema = capability.input_schema(command).map(|schema| schema.to_string());
    out.extend_from_slice(schema.as_deref().unwrap_or(ANYTHING).as_bytes());
    out.push(b'}');
}

/// A CallToolResult: the payload as JSON in one text block, then the pictures and videos.
pub fn result(payload: &Value, images: &[Image]) -> String {
    let mut out = b"{\"content\":[{\"type\":\"text\",\"text\":".to_vec();
    json::push_string(&mut out, &payload.to_string());
    out.push(b'}');
    for image in images {
        let (start, end) = if image.is_picture() {
            (&b",{\"type\":\"image\",\"data\":"[..], &b"}"[..])
        } else {
            // MCP has no kind of content for videos, but any file can be a resource.
            (&b",{\"type\":\"resource\",\"resource\":{\"uri\":\"openclaw-node:video\",\"blob\":"[..], &b"}}"[..])
        };
        out.extend_from_slice(start);
        json::push_string(&mut out, &image.base64);
        out.extend_from_slice(b",\"mimeType\":");
        json::push_string(&mut out, &image.mime_type);
        out.extend_from_slice(end);
    }
    out.extend_from_slice(b"],\"isError\":false}");
    text(out)
}

/// A CallToolResult that says that the tool failed.
pub fn failure(error: &str) -> String {
    let mut out = b"{\"content\":[{\"type\":\"text\",\"text\":".to_vec();
    json::push_string(&mut out, error);
    out.extend_from_slice(b"}],\"isError\":true}");
    text(out)
}

fn text(out: Vec<u8>) -> String {
    String::from_utf8(out).expect("only strings were pushed")
}
