//! From a message's text to its answer, without a socket.
//!
//! The rules are those that local clients of the desktop app are used to: a lenient envelope, any id, and whatever
//! is wrong with a call is a result that the model can read. A request that names 2026-07-28 in its `_meta` is
//! served by [`crate::mcp`] instead, with that version's rules.

use std::future::Future;
use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::time::Instant;

use bytes::Bytes;
use futures_util::FutureExt;
use http::{HeaderMap, StatusCode};
use serde_json::Value;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use super::calls::{Calls, EndedBy, Invocation};
use super::message::{self, Members, Message};
use super::modern;
use crate::json;
use crate::jsonrpc::{self, INVALID_REQUEST, METHOD_NOT_FOUND};
use crate::mcp::LEGACY_VERSIONS;
use crate::node::capabilities::{self, Args, Capability, Crashed, Image, Registry, Request, Response};
use crate::node::wire;

/// Something broke that is not the client's fault.
pub const INTERNAL_ERROR: i64 = -32603;
/// All that is said of it: the cause may hold anything.
pub const INTERNAL_ERROR_TEXT: &str = "internal error";
/// The key by which a request of 2026-07-28 is known.
const VERSION_KEY: &str = "io.modelcontextprotocol/protocolVersion";

/// An answer: its HTTP status, and its JSON.
pub type Answer = (StatusCode, Vec<u8>);

/// Answers messages from what the registry holds at that moment.
#[derive(Debug)]
pub struct Dispatcher {
    registry: Arc<Registry>,
    calls: Calls,
    /// The server's identity, as JSON text.
    pub(super) server_info: Bytes,
    /// The commands that are being carried out.
    tasks: TaskTracker,
}

/// How a call ended, as the result's JSON text.
#[derive(Debug)]
pub(super) enum Called {
    /// A CallToolResult.
    Result(String),
    /// The capability panicked.
    Crashed,
}

/// A call that can be made.
pub(super) struct Call {
    capability: Arc<dyn Capability>,
    request: Request,
}

/// The tokens that end what a message started.
#[derive(Debug, Clone)]
pub struct Ends {
    /// Its time is over, or the server shuts down.
    pub transport: CancellationToken,
    /// Its client has gone. A message that wants no answer is not ended by it.
    pub client_gone: CancellationToken,
}

impl Dispatcher {
    /// A dispatcher of a server with this identity. What it starts is counted by `tasks`.
    pub fn new(registry: Arc<Registry>, name: &str, version: &str, tasks: TaskTracker) -> Self {
        let server_info = serde_json::json!({ "name": name, "version": version }).to_string().into();
        Dispatcher { registry, calls: Calls::default(), server_info, tasks }
    }

    /// Answers one message; `None` if it wants no answer.
    pub async fn dispatch(self: &Arc<Self>, text: &str, headers: &HeaderMap, ends: &Ends) -> Option<Answer> {
        let message = match Message::parse(text) {
            Ok(message) => message,
            Err(invalid) => return Some(ok(jsonrpc::error(Some("null"), invalid.code, &invalid.message, None))),
        };
        let id = message.id.map(message::echoed);
        let answer = AssertUnwindSafe(self.answer(&message, text, headers, &ends.transport)).catch_unwind();
        let ended = tokio::select! {
            ended = answer => ended,
            // Nobody is left to be answered; what was started ends with its call.
            () = ends.client_gone.cancelled(), if id.is_some() => return None,
        };
        let internal = || ok(jsonrpc::error(id, INTERNAL_ERROR, INTERNAL_ERROR_TEXT, None));
        let answer = ended.unwrap_or_else(|_| internal());
        id.map(|_| answer)
    }

    async fn answer(
        self: &Arc<Self>,
        message: &Message<'_>,
        text: &str,
        headers: &HeaderMap,
        transport: &CancellationToken,
    ) -> Answer {
        let id = message.id.map_or("null", message::echoed);
        let error = |code, text: &str| ok(jsonrpc::error(Some(id), code, text, None));
        let Some(method) = &message.method else { return error(INVALID_REQUEST, "Missing 'method'") };
        let params = message.params.and_then(message::members);
        if message.id.is_some() && params.as_ref().is_some_and(is_modern) {
            return modern::answer(self, text, headers, transport).await;
        }
        tracing::debug!(request.id = id, method, "local request");
        let result = match &**method {
            "initialize" => self.initialize(params.as_ref()),
            "ping" | "notifications/initialized" => "{}".to_owned(),
            "notifications/cancelled" => {
                self.cancel(params.as_ref().and_then(|params| params.get("requestId")).map(|id| id.get()));
                "{}".to_owned()
            }
            "tools/list" => format!(r#"{{"tools":{}}}"#, self.list()),
            "tools/call" => match self.call(message.id, params.as_ref(), transport).await {
                Called::Result(result) => result,
                Called::Crashed => return error(INTERNAL_ERROR, INTERNAL_ERROR_TEXT),
            },
            // Some clients ask for these whatever the capabilities say.
            "resources/list" => r#"{"resources":[]}"#.to_owned(),
            "prompts/list" => r#"{"prompts":[]}"#.to_owned(),
            _ => return error(METHOD_NOT_FOUND, &format!("Method not found: {method}")),
        };
        ok(jsonrpc::result(id, result.as_bytes()))
    }

    fn initialize(&self, params: Option<&Members<'_>>) -> String {
        let offered = params.and_then(|params| params.get("protocolVersion")?.get().get(1..));
        let offered = offered.and_then(|version| version.strip_suffix('"'));
        let version = LEGACY_VERSIONS.into_iter().find(|version| offered == Some(*version));
        format!(
            r#"{{"protocolVersion":"{}","capabilities":{{"tools":{{"listChanged":false}}}},"serverInfo":{}}}"#,
            version.unwrap_or(LEGACY_VERSIONS[0]),
            String::from_utf8_lossy(&self.server_info)
        )
    }

    /// A client cancels the request with this id.
    pub(super) fn cancel(&self, id: Option<&str>) {
        match id.filter(|id| *id != "null") {
            Some(id) => {
                let outcome = self.calls.cancel(id, Instant::now());
                tracing::debug!(request.id = id, ?outcome, "cancellation");
            }
            None => tracing::debug!("a cancellation names no request"),
        }
    }

    /// The `tools` array.
    pub(super) fn list(&self) -> String {
        wire::tools(&self.registry.local(), |_| true)
    }

    /// The call that `params` ask for, or what is wrong with them.
    fn requested(&self, params: Option<&Members<'_>>) -> Result<Call, String> {
        let params = params.ok_or("Invalid params: expected object")?;
        let name = params.get("name").and_then(|name| message::string(name.get())).ok_or("Missing 'name'")?;
        if name.trim().is_empty() {
            return Err("Empty tool name".to_owned());
        }
        let arguments = params.get("arguments").map_or("null", |arguments| arguments.get());
        if arguments != "null" && !json::is_object(arguments) {
            return Err("'arguments' must be a JSON object if present".to_owned());
        }
        self.find(name, arguments)
    }

    /// The call of a tool by its name and the text of its arguments.
    pub(super) fn find(&self, name: String, arguments: &str) -> Result<Call, String> {
        let capabilities = self.registry.local();
        let Some(capability) = capabilities::find(&capabilities, &name) else {
            return Err(format!("Unknown tool: {name}"));
        };
        let args: Value =
            serde_json::from_str(arguments).map_err(|error| format!("'arguments' cannot be read: {error}"))?;
        let request = Request { command: name, args: Args::new(args), session_key: None };
        Ok(Call { capability: Arc::clone(capability), request })
    }

    /// Answers tools/call. Only a call with an id can be cancelled.
    async fn call(
        self: &Arc<Self>,
        id: Option<&str>,
        params: Option<&Members<'_>>,
        transport: &CancellationToken,
    ) -> Called {
        match self.requested(params) {
            Ok(call) => self.run(id.map(str::to_owned), call, transport.clone()).await,
            Err(error) => Called::Result(wire::failure(&error)),
        }
    }

    /// Makes a call. Dropping the future of a call with an id ends it.
    pub(super) fn run(
        self: &Arc<Self>,
        id: Option<String>,
        call: Call,
        transport: CancellationToken,
    ) -> impl Future<Output = Called> + Send + 'static {
        let dispatcher = Arc::clone(self);
        async move {
            let Some(id) = id else {
                let ended = capabilities::run(call.capability, call.request, transport, &dispatcher.tasks);
                return wrap(ended.await);
            };
            let registered = dispatcher.calls.register(&id, &transport, Instant::now());
            settle(&registered.invocation, call, &dispatcher.tasks).await
        }
    }
}

/// Carries a call out, unless it is over before. Nobody waits for a command that does not heed its token.
async fn settle(invocation: &Invocation, call: Call, tasks: &TaskTracker) -> Called {
    let token = invocation.token();
    let over = |ended_by| {
        let text = match ended_by {
            EndedBy::Caller => "cancelled",
            EndedBy::Transport => "request timed out",
        };
        Called::Result(wire::failure(text))
    };
    if token.is_cancelled() {
        return over(invocation.complete().err().unwrap_or(EndedBy::Transport));
    }
    let ended = tokio::select! {
        ended = capabilities::run(call.capability, call.request, token.clone(), tasks) => Some(ended),
        () = token.cancelled() => None,
    };
    match (invocation.complete(), ended) {
        (Err(ended_by), _) => over(ended_by),
        (Ok(()), Some(ended)) => wrap(ended),
        // The token has fired, so completion cannot have won.
        (Ok(()), None) => over(EndedBy::Transport),
    }
}

fn is_modern(params: &Members<'_>) -> bool {
    let meta = params.get("_meta").and_then(|meta| message::members(meta.get()));
    meta.is_some_and(|meta| meta.contains_key(VERSION_KEY))
}

fn ok(body: Vec<u8>) -> Answer {
    (StatusCode::OK, body)
}

/// The result of a command as a CallToolResult: its payload as JSON in one text block, then its pictures.
fn wrap(ended: Result<Response, Crashed>) -> Called {
    let (payload, mut images) = match ended {
        Ok(Response::Done { payload, images }) => (payload, images),
        Ok(Response::Failed(error)) if error.is_empty() => {
            return Called::Result(wire::failure("tool execution failed"));
        }
        Ok(Response::Failed(error)) => return Called::Result(wire::failure(&error)),
        Err(Crashed) => return Called::Crashed,
    };
    // A video is in the payload already, and twice would be too much.
    images.retain(Image::is_picture);
    Called::Result(wire::result(&payload, &images))
}
