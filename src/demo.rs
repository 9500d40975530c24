//! The whole way in one program: an app that lends a tool over a bridge, and an MCP client that calls it.
//!
//! Both ends are real: the app registers over HTTP and answers over a WebSocket, the client speaks MCP over HTTP,
//! and the proxy between them is the one that is run for use.

use std::io::Write;
use std::time::Duration;

use anyhow::{Context, ensure};
use futures_util::{SinkExt, StreamExt};
use serde_json::{Value, json};
use tokio::net::TcpStream;
use tokio_tungstenite::tungstenite::Message;
use tokio_tungstenite::tungstenite::client::IntoClientRequest;
use tokio_tungstenite::{MaybeTlsStream, WebSocketStream, connect_async};
use tokio_util::sync::CancellationToken;

use crate::auth::Token;
use crate::json;

/// How long each step may take.
const STEP_TIMEOUT: Duration = Duration::from_secs(10);

type Socket = WebSocketStream<MaybeTlsStream<TcpStream>>;

/// Where the proxy is, and what it asks for.
#[derive(Debug)]
pub struct Demo {
    /// Its base URL.
    pub base_url: String,
    /// The token of apps.
    pub app_token: Token,
    /// The token of MCP clients.
    pub openclaw_token: Token,
}

impl Demo {
    /// Registers an app, connects its bridge, lists and calls its tool, and tells each step to `out`; the last
    /// line is what the tool answered. Then runs `and_then`, for as long as which the app goes on lending.
    ///
    /// # Errors
    /// What went wrong, and at which step.
    pub async fn run(&self, out: &mut impl Write, and_then: impl Future<Output = ()>) -> anyhow::Result<()> {
        let http = reqwest::Client::builder().timeout(STEP_TIMEOUT).build()?;
        let session = self.register(&http).await.context("the app could not register")?;
        let session_id = text(&session, "mcpSessionId")?;
        let mcp_url = text(&session, "mcp_url")?;
        let bridge_url = text(&session, "bridge_url")?;
        writeln!(out, "1. The app registered chat session {session_id} with the tool echo_text.")?;

        let socket = self.connect(bridge_url).await.context("the app could not connect its bridge")?;
        writeln!(out, "2. Its bridge is connected: {bridge_url}")?;
        let stop = CancellationToken::new();
        let app = tokio::spawn(lend(socket, stop.clone()));

        let list = self.mcp(&http, mcp_url, 1, "tools/list", json!({})).await.context("tools/list failed")?;
        let tools = json::member(&list, "tools").unwrap_or_default();
        writeln!(out, "3. An MCP client asks {mcp_url} for tools/list: {tools}")?;

        let params = json!({ "name": "echo_text", "arguments": { "text": "Hello from an app behind NAT" } });
        let result = self.mcp(&http, mcp_url, 2, "tools/call", params).await.context("tools/call failed")?;
        ensure!(json::member(&result, "isError") == Some("false"), "the tool failed: {result}");
        writeln!(out, "4. It calls echo_text; the call travels over the bridge, and this comes back:")?;
        writeln!(out, "{}", json::member(&result, "structuredContent").unwrap_or_default())?;
        out.flush()?;

        and_then.await;
        stop.cancel();
        app.await.context("the app crashed")?;
        Ok(())
    }

    async fn register(&self, http: &reqwest::Client) -> anyhow::Result<Value> {
        let registration = json!({
            "device_id": "demo-device",
            "device_name": "Demo app",
            "tools": [{
                "name": "echo_text",
                "description": "Echo text.",
                "input_schema": {
                    "type": "object",
                    "properties": { "text": { "type": "string" } },
                    "required": ["text"],
                },
            }],
        });
        let request = http.post(format!("{}/v1/chat/sessions", self.base_url)).json(&registration);
        Ok(serde_json::from_str(&answer(authorize(request, &self.app_token)).await?)?)
    }

    async fn connect(&self, bridge_url: &str) -> anyhow::Result<Socket> {
        let mut request = bridge_url.into_client_request()?;
        if !self.app_token.is_empty() {
            request.headers_mut().insert("authorization", format!("Bearer {}", self.app_token.expose()).parse()?);
        }
        let (socket, _) = tokio::time::timeout(STEP_TIMEOUT, connect_async(request)).await??;
        Ok(socket)
    }

    /// One MCP request, as a client of 2025-11-25 sends it.
    async fn mcp(
        &self,
        http: &reqwest::Client,
        url: &str,
        id: u64,
        method: &str,
        params: Value,
    ) -> anyhow::Result<String> {
        let body = json!({ "jsonrpc": "2.0", "id": id, "method": method, "params": params });
        let request = http
            .post(url)
            .header("accept", "application/json, text/event-stream")
            .header("mcp-protocol-version", "2025-11-25")
            .json(&body);
        let response = answer(authorize(request, &self.openclaw_token)).await?;
        let result = json::member(&response, "result").with_context(|| response.clone())?;
        Ok(result.to_owned())
    }
}

/// The app's side: answers calls until `stop`, or until the proxy goes.
async fn lend(mut socket: Socket, stop: CancellationToken) {
    while let Some(Some(Ok(message))) = stop.run_until_cancelled(socket.next()).await {
        let Message::Text(frame) = message else { continue };
        let Ok(frame) = serde_json::from_str::<Value>(&frame) else { continue };
        let reply = match frame["type"].as_str() {
            Some("ping") => json!({ "type": "pong" }),
            Some("invoke_tool") => json!({
                "type": "invoke_result",
                "mcpSessionId": frame["mcpSessionId"],
                "request_id": frame["request_id"],
                "ok": true,
                "content": { "echoed_text": frame["arguments"]["text"] },
            }),
            _ => continue,
        };
        if socket.send(Message::text(reply.to_string())).await.is_err() {
            break;
        }
    }
    // The proxy may be gone already.
    let _closed = tokio::time::timeout(STEP_TIMEOUT, socket.close(None)).await;
}

fn authorize(request: reqwest::RequestBuilder, token: &Token) -> reqwest::RequestBuilder {
    if token.is_empty() { request } else { request.bearer_auth(token.expose()) }
}

async fn answer(request: reqwest::RequestBuilder) -> anyhow::Result<String> {
    let response = request.send().await?;
    let status = response.status();
    let body = response.text().await?;
    ensure!(status.is_success(), "HTTP {status}: {body}");
    Ok(body)
}

fn text<'a>(value: &'a Value, member: &str) -> anyhow::Result<&'a str> {
    value[member].as_str().with_context(|| format!("the answer has no {member}"))
}
