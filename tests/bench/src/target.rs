//! What is being driven: its URLs, its field naming and the bodies it wants.

use anyhow::{Context, Result, bail};
use clap::{Args, ValueEnum};
use serde_json::{Value, json};

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Naming {
    /// `device_id`, `input_schema`
    Snake,
    /// `deviceId`, `inputSchema`
    Camel,
}

#[derive(Args, Clone, Debug)]
pub struct TargetArgs {
    /// Where the proxy listens; plain http only.
    #[arg(long, default_value = "http://127.0.0.1:8000", global = true)]
    pub base_url: String,
    #[arg(long, default_value = "/v1/chat/sessions", global = true)]
    pub register_path: String,
    #[arg(long, default_value = "/v1/chat/sessions/{session_id}", global = true)]
    pub delete_path: String,
    #[arg(long, default_value = "/v1/chat/sessions/{session_id}/bridge", global = true)]
    pub bridge_path: String,
    #[arg(long, default_value = "/v1/mcp/{session_id}", global = true)]
    pub mcp_path: String,
    /// Also send the session id in this request header (give an --mcp-path without `{session_id}`).
    #[arg(long, global = true)]
    pub session_header: Option<String>,
    /// Field of the registration response that holds the session id.
    #[arg(long, default_value = "mcpSessionId", global = true)]
    pub session_id_field: String,
    /// Field naming of the registration body. Bridge replies copy the naming of each invoke_tool.
    #[arg(long, value_enum, default_value = "snake", global = true)]
    pub naming: Naming,
    /// Bearer token for registration, deletion and the bridge.
    #[arg(long, default_value = "", global = true)]
    pub app_token: String,
    /// Bearer token for the MCP endpoint.
    #[arg(long, default_value = "", global = true)]
    pub mcp_token: String,
    /// Extra header on every MCP request, as `Name: value`; repeatable.
    #[arg(long = "header", global = true)]
    pub headers: Vec<String>,
    /// Tools registered by each session.
    #[arg(long, default_value_t = 1, global = true)]
    pub tools: usize,
    /// Process ids of the server, to report its CPU time and memory.
    #[arg(long, value_delimiter = ',', global = true)]
    pub server_pid: Vec<u32>,
}

#[derive(Clone, Debug)]
pub struct Target {
    args: TargetArgs,
    /// `host:port`
    pub authority: String,
}

pub const TOOL: &str = "echo_text";

impl Target {
    pub fn new(args: TargetArgs) -> Result<Self> {
        let Some(rest) = args.base_url.strip_prefix("http://") else {
            bail!("--base-url must start with http://");
        };
        let authority = rest.trim_end_matches('/').to_owned();
        if authority.is_empty() || authority.contains('/') {
            bail!("--base-url must be http://host:port");
        }
        let authority = if authority.contains(':') { authority } else { format!("{authority}:80") };
        Ok(Self { args, authority })
    }

    pub fn pids(&self) -> &[u32] {
        &self.args.server_pid
    }

    pub fn bridge_url(&self, session: &str) -> String {
        format!("ws://{}{}", self.authority, fill(&self.args.bridge_path, session))
    }

    pub fn app_token(&self) -> &str {
        &self.args.app_token
    }

    /// The request head for one MCP call, up to and including the blank line.
    pub fn mcp_head(&self, session: &str, body_len: usize) -> Vec<u8> {
        let mut extra = bearer(&self.args.mcp_token);
        if let Some(name) = &self.args.session_header {
            extra.push_str(&format!("{name}: {session}\r\n"));
        }
        for header in &self.args.headers {
            extra.push_str(&format!("{header}\r\n"));
        }
        self.head("POST", &fill(&self.args.mcp_path, session), &extra, Some(body_len))
    }

    /// A whole registration request.
    pub fn register_request(&self, device: usize) -> Vec<u8> {
        let body = self.register_body(device).to_string();
        let extra = bearer(&self.args.app_token);
        let mut request = self.head("POST", &self.args.register_path, &extra, Some(body.len()));
        request.extend_from_slice(body.as_bytes());
        request
    }

    /// A whole deletion request.
    pub fn delete_request(&self, session: &str) -> Vec<u8> {
        let extra = bearer(&self.args.app_token);
        self.head("DELETE", &fill(&self.args.delete_path, session), &extra, None)
    }

    /// Takes the session id out of a registration response.
    pub fn session_id(&self, body: &[u8]) -> Result<String> {
        let reply: Value = serde_json::from_slice(body).context("registration reply is not JSON")?;
        reply[&self.args.session_id_field]
            .as_str()
            .map(str::to_owned)
            .with_context(|| format!("no {} in registration reply", self.args.session_id_field))
    }

    fn head(&self, method: &str, path: &str, extra: &str, body_len: Option<usize>) -> Vec<u8> {
        let length =
            body_len.map_or(String::new(), |n| format!("Content-Type: application/json\r\nContent-Length: {n}\r\n"));
        format!(
            "{method} {path} HTTP/1.1\r\nHost: {}\r\nAccept: application/json, text/event-stream\r\n{extra}{length}\r\n",
            self.authority
        )
        .into_bytes()
    }

    fn register_body(&self, device: usize) -> Value {
        let schema = json!({
            "type": "object",
            "properties": {
                "seq": {"type": "integer"},
                "text": {"type": "string"},
                "items": {"type": "array"}
            }
        });
        let name = |i: usize| {
            if i == 0 { TOOL.to_owned() } else { format!("{TOOL}_{i}") }
        };
        match self.args.naming {
            Naming::Snake => json!({
                "device_id": format!("device-{device}"),
                "device_name": "load",
                "app_version": "1.0.0",
                "chat_id": format!("chat-{device}"),
                "tools": (0..self.args.tools).map(|i| json!({
                    "name": name(i),
                    "path": format!("/tools/{}", name(i)),
                    "description": "Echo the arguments.",
                    "input_schema": schema.clone(),
                })).collect::<Vec<_>>(),
            }),
            Naming::Camel => json!({
                "deviceId": format!("device-{device}"),
                "deviceName": "load",
                "appVersion": "1.0.0",
                "chatId": format!("chat-{device}"),
                "tools": (0..self.args.tools).map(|i| json!({
                    "name": name(i),
                    "path": format!("/tools/{}", name(i)),
                    "description": "Echo the arguments.",
                    "inputSchema": schema.clone(),
                })).collect::<Vec<_>>(),
            }),
        }
    }
}

fn bearer(token: &str) -> String {
    if token.is_empty() { String::new() } else { format!("Authorization: Bearer {token}\r\n") }
}

fn fill(template: &str, session: &str) -> String {
    template.replace("{session_id}", session)
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;

    #[derive(Parser)]
    struct Cli {
        #[command(flatten)]
        target: TargetArgs,
    }

    fn target(args: &[&str]) -> Target {
        let argv = std::iter::once(&"t").chain(args);
        Target::new(Cli::parse_from(argv).target).unwrap()
    }

    #[test]
    fn fills_path_and_headers() {
        let t = target(&["--mcp-token", "k", "--header", "X-A: b"]);
        let head = String::from_utf8(t.mcp_head("s1", 7)).unwrap();
        assert!(head.starts_with("POST /v1/mcp/s1 HTTP/1.1\r\nHost: 127.0.0.1:8000\r\n"));
        assert!(head.contains("Authorization: Bearer k\r\n"));
        assert!(head.contains("X-A: b\r\n"));
        assert!(head.ends_with("Content-Length: 7\r\n\r\n"));
    }

    #[test]
    fn naming_changes_the_body_fields() {
        assert!(target(&[]).register_body(1).get("device_id").is_some());
        let camel = target(&["--naming", "camel"]).register_body(1);
        assert!(camel["tools"][0].get("inputSchema").is_some());
    }

    #[test]
    fn rejects_a_base_url_with_a_path() {
        let args = Cli::parse_from(["t", "--base-url", "http://127.0.0.1:1/x"]).target;
        assert!(Target::new(args).is_err());
    }
}
