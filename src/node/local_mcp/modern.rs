//! Requests of 2026-07-28, handed to [`crate::mcp`]: the registry as its set of tools.

use std::pin::Pin;
use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use http::{HeaderMap, StatusCode};
use tokio_util::sync::CancellationToken;

use super::dispatch::{Answer, Called, Dispatcher, INTERNAL_ERROR, INTERNAL_ERROR_TEXT};
use super::message::MAX_DEPTH;
use crate::jsonrpc::{self, Message};
use crate::mcp::headers::ParamHeaders;
use crate::mcp::listen::Listeners;
use crate::mcp::{self, AnswerSettings, CallParams, Era, Event, NotCalled, Output, Reply, ToolView, Tools};

/// There are no event streams here, so it does not matter how often they would be looked after.
const SETTINGS: AnswerSettings = AnswerSettings {
    stream_after: Duration::from_secs(60),
    keep_alive: Duration::from_secs(60),
    max_result_bytes: usize::MAX,
};

/// Answers a request that names its version.
pub(super) async fn answer(
    dispatcher: &Arc<Dispatcher>,
    text: &str,
    headers: &HeaderMap,
    transport: &CancellationToken,
) -> Answer {
    let (id, method, params) = match Message::parse(text, MAX_DEPTH) {
        Ok(Message::Request { id, method, params }) => (id, method, params),
        Ok(_) => return (StatusCode::BAD_REQUEST, jsonrpc::error(None, jsonrpc::INVALID_REQUEST, "No request.", None)),
        Err(invalid) => {
            return (StatusCode::BAD_REQUEST, jsonrpc::error(invalid.id, invalid.code, &invalid.message, None));
        }
    };
    let request = mcp::Request { id, method: &method, params: &params, headers, accepts_stream: false };
    let tools = Lent { dispatcher, transport, list: dispatcher.list().into(), param_headers: ParamHeaders::default() };
    match mcp::dispatch(&request, Some(&tools), &SETTINGS).await {
        mcp::Answer::Json(status, body) => (status, body.into()),
        mcp::Answer::List(pieces) => (StatusCode::OK, pieces.concat()),
        mcp::Answer::Stream(_) | mcp::Answer::Listen(_) => unreachable!("streams are not accepted"),
    }
}

/// What the registry holds at one moment.
struct Lent<'a> {
    dispatcher: &'a Arc<Dispatcher>,
    transport: &'a CancellationToken,
    list: Bytes,
    /// Commands ask for no headers.
    param_headers: ParamHeaders,
}

/// A call in flight.
struct Running(Pin<Box<dyn Future<Output = Called> + Send>>);

impl mcp::Call for Running {
    async fn next(&mut self, until: Instant) -> Event {
        match tokio::time::timeout_at(until.into(), &mut self.0).await {
            Err(_) => Event::Quiet,
            Ok(Called::Result(result)) => Event::Ended(Reply::Result(result.into())),
            Ok(Called::Crashed) => Event::Ended(Reply::RpcError {
                code: INTERNAL_ERROR,
                message: INTERNAL_ERROR_TEXT.to_owned(),
                data: None,
            }),
        }
    }
}

impl Tools for Lent<'_> {
    type Call = Running;

    fn server_info(&self) -> &Bytes {
        &self.dispatcher.server_info
    }

    fn instructions(&self) -> Option<&str> {
        None
    }

    fn list(&self, _: Era) -> &Bytes {
        &self.list
    }

    fn tool(&self, name: &str) -> Option<ToolView<'_>> {
        self.dispatcher.find(name.to_owned(), "null").ok()?;
        Some(ToolView { output: Output::Unspecified, param_headers: &self.param_headers })
    }

    fn call(&self, call: CallParams<'_>) -> Result<Running, NotCalled> {
        let found = self.dispatcher.find(call.name.to_owned(), call.arguments).map_err(NotCalled::Failed)?;
        let running = self.dispatcher.run(Some(call.id.to_owned()), found, self.transport.clone());
        Ok(Running(Box::pin(running)))
    }

    fn listeners(&self, _: Era) -> Option<&Listeners> {
        None
    }
}
