//! The app side: sessions, their bridges, and an echo that answers every invoke_tool.

use std::time::Duration;

use anyhow::{Context, Result, bail};
use futures_util::{FutureExt, SinkExt, StreamExt};
use serde::Deserialize;
use serde_json::value::RawValue;
use tokio::net::TcpStream;
use tokio::task::JoinHandle;
use tokio_tungstenite::tungstenite::client::IntoClientRequest;
use tokio_tungstenite::tungstenite::protocol::WebSocketConfig;
use tokio_tungstenite::tungstenite::{self, Message};
use tokio_tungstenite::{WebSocketStream, client_async_with_config};

use crate::http::Conn;
use crate::target::Target;

pub struct Session {
    pub id: String,
    /// The bridge's task; it runs until the server closes the socket or the task is aborted.
    pub bridge: Option<JoinHandle<()>>,
}

#[derive(Clone, Copy, Debug)]
pub struct Echo {
    /// How long the app takes for each call.
    pub delay: Duration,
    /// Read buffer of each bridge.
    pub buffer: usize,
}

#[derive(Deserialize)]
struct Frame<'a> {
    #[serde(rename = "type", borrow)]
    kind: std::borrow::Cow<'a, str>,
    #[serde(rename = "mcpSessionId", borrow)]
    session: Option<&'a RawValue>,
    #[serde(borrow)]
    request_id: Option<&'a RawValue>,
    #[serde(rename = "requestId", borrow)]
    request_id_camel: Option<&'a RawValue>,
    #[serde(borrow)]
    arguments: Option<&'a RawValue>,
}

/// The app's answer to one text frame, in the naming that the frame used.
fn answer(text: &str) -> Result<Option<String>> {
    let frame: Frame = serde_json::from_str(text).context("bridge frame")?;
    let session = frame.session.map_or("null", RawValue::get);
    match &*frame.kind {
        "invoke_tool" => {
            let (field, id) = match (frame.request_id, frame.request_id_camel) {
                (Some(id), _) => ("request_id", id.get()),
                (None, Some(id)) => ("requestId", id.get()),
                (None, None) => bail!("invoke_tool without a request id"),
            };
            let arguments = frame.arguments.map_or("{}", RawValue::get);
            let mut reply = String::with_capacity(arguments.len() + session.len() + id.len() + 96);
            for part in [
                "{\"type\":\"invoke_result\",\"mcpSessionId\":",
                session,
                ",\"",
                field,
                "\":",
                id,
                ",\"ok\":true,\"content\":",
                arguments,
                "}",
            ] {
                reply.push_str(part);
            }
            Ok(Some(reply))
        }
        "ping" => Ok(Some(format!("{{\"type\":\"pong\",\"mcpSessionId\":{session}}}"))),
        _ => Ok(None),
    }
}

pub async fn register(conn: &mut Conn, target: &Target, device: usize) -> Result<String> {
    let request = target.register_request(device);
    let response = conn.call(&request, b"").await?;
    if !(200..300).contains(&response.status) {
        bail!("registration: {} {}", response.status, String::from_utf8_lossy(response.body));
    }
    target.session_id(response.body)
}

pub async fn delete(conn: &mut Conn, target: &Target, session: &str) -> Result<()> {
    let request = target.delete_request(session);
    let response = conn.call(&request, b"").await?;
    if !(200..300).contains(&response.status) {
        bail!("deletion: {}", response.status);
    }
    Ok(())
}

/// Connects the bridge of `session` and answers on it from then on.
pub async fn attach(target: &Target, session: &str, echo: Echo) -> Result<JoinHandle<()>> {
    let mut request = target.bridge_url(session).into_client_request()?;
    if !target.app_token().is_empty() {
        let value = format!("Bearer {}", target.app_token());
        request.headers_mut().insert("Authorization", value.parse()?);
    }
    let stream = TcpStream::connect(&target.authority).await.context("bridge connect")?;
    stream.set_nodelay(true)?;
    let config = WebSocketConfig::default()
        .read_buffer_size(echo.buffer)
        .write_buffer_size(echo.buffer)
        .max_message_size(None)
        .max_frame_size(None);
    let (socket, _) = client_async_with_config(request, stream, Some(config)).await.context("bridge handshake")?;
    Ok(tokio::spawn(async move {
        if let Err(error) = serve(socket, echo.delay).await {
            eprintln!("bridge: {error:#}");
        }
    }))
}

async fn serve(mut socket: WebSocketStream<TcpStream>, delay: Duration) -> Result<()> {
    while let Some(message) = socket.next().await {
        let mut message = match message {
            Ok(message) => message,
            Err(tungstenite::Error::ConnectionClosed | tungstenite::Error::Protocol(_)) => break,
            Err(error) => return Err(error.into()),
        };
        if !delay.is_zero() {
            tokio::time::sleep(delay).await;
        }
        // Answer all that has arrived before flushing once.
        loop {
            if let Message::Text(text) = message
                && let Some(reply) = answer(&text)?
            {
                socket.feed(Message::text(reply)).await?;
            }
            match socket.next().now_or_never() {
                Some(Some(Ok(next))) => message = next,
                _ => break,
            }
        }
        socket.flush().await?;
    }
    Ok(())
}

/// Registers sessions `from..to` and, with an echo, connects their bridges; `width` at a time.
pub async fn open(target: &Target, from: usize, to: usize, width: usize, echo: Option<Echo>) -> Result<Vec<Session>> {
    let width = width.clamp(1, to.saturating_sub(from).max(1));
    let workers: Vec<JoinHandle<Result<Vec<Session>>>> = (0..width)
        .map(|worker| {
            let target = target.clone();
            tokio::spawn(async move {
                let mut conn = Conn::new(&target.authority);
                let mut sessions = Vec::new();
                for device in (from + worker..to).step_by(width) {
                    let id = register(&mut conn, &target, device).await?;
                    let bridge = match echo {
                        Some(echo) => Some(attach(&target, &id, echo).await?),
                        None => None,
                    };
                    sessions.push(Session { id, bridge });
                }
                Ok(sessions)
            })
        })
        .collect();
    let mut sessions = Vec::with_capacity(to - from);
    for worker in workers {
        sessions.extend(worker.await??);
    }
    Ok(sessions)
}

/// Deletes the sessions and ends their bridges; failures are ignored, the run is over.
pub async fn close(target: &Target, sessions: Vec<Session>) {
    let mut conn = Conn::new(&target.authority);
    for session in sessions {
        let _ = delete(&mut conn, target, &session.id).await;
        if let Some(bridge) = session.bridge {
            bridge.abort();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn answers_in_the_naming_of_the_frame() {
        let snake =
            r#"{"type":"invoke_tool","mcpSessionId":"s","request_id":"s:1","tool_name":"t","arguments":{"a":1}}"#;
        assert_eq!(
            answer(snake).unwrap().unwrap(),
            r#"{"type":"invoke_result","mcpSessionId":"s","request_id":"s:1","ok":true,"content":{"a":1}}"#
        );
        let camel = snake.replace("request_id", "requestId");
        assert!(answer(&camel).unwrap().unwrap().contains(r#""requestId":"s:1""#));
    }

    #[test]
    fn answers_ping_and_ignores_the_rest() {
        assert_eq!(
            answer(r#"{"type":"ping","mcpSessionId":"s"}"#).unwrap().unwrap(),
            r#"{"type":"pong","mcpSessionId":"s"}"#
        );
        assert!(answer(r#"{"type":"other"}"#).unwrap().is_none());
        assert!(answer("nonsense").is_err());
    }
}
