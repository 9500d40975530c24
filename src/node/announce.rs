//! How a session is told to whoever started the node.

use serde_json::{Value, json};

use super::bridge_client::Session;

/// A session as a line of JSON.
pub fn as_json(session: &Session) -> String {
    json!({
        "mcpSessionId": session.id,
        "mcp_url": session.mcp_url,
        "bridge_url": session.bridge_url,
        "tools": tool_names(&session.tools),
    })
    .to_string()
}

/// A session as a person wants to read of it, with what to write into OpenClaw's configuration.
pub fn for_people(session: &Session, name: &str) -> String {
    let tools = tool_names(&session.tools);
    // The name is a key of the client's configuration, and a prefix of the tools' names there.
    let key: String =
        name.chars().map(|c| if c.is_ascii_alphanumeric() { c.to_ascii_lowercase() } else { '-' }).collect();
    let key = key.split('-').filter(|word| !word.is_empty()).collect::<Vec<_>>().join("-");
    let servers = json!({ key: {
        "url": session.mcp_url,
        "transport": "streamable-http",
        "headers": { "Authorization": "Bearer ${OPENCLAW_PROXY_OPENCLAW_TOKEN}" },
        "requestTimeoutMs": 130_000,
    } });
    let snippet = format!("{:#}", json!({ "mcp": { "servers": servers } }));
    let news =
        if session.is_replacement { "\nThe proxy forgot the session before, so the MCP URL has changed." } else { "" };
    format!(
        "Lending {} tools of {name}: {}{news}\nMCP URL: {}\nFor OpenClaw, in ~/.openclaw/openclaw.json:\n{snippet}",
        tools.len(),
        tools.join(", "),
        session.mcp_url
    )
}

/// The names in the text of a `tools` array.
fn tool_names(tools: &str) -> Vec<String> {
    let tools: Vec<Value> = serde_json::from_str(tools).unwrap_or_default();
    tools.iter().filter_map(|tool| tool["name"].as_str().map(str::to_owned)).collect()
}
