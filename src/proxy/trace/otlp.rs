//! A traced call in OpenTelemetry's words and bytes: the messages of `opentelemetry/proto/trace/v1` as far as they are
//! used, and the two spans of a call.
//!
//! The messages are written down here because the crates that have them bring an SDK of 19 crates along, with second
//! copies of some; the tests read them with the official ones.

use std::collections::BTreeMap;
use std::time::{Duration, SystemTime};

use prost::Message;

use super::Traced;
use super::context::TraceParent;
use crate::process;
use crate::proxy::metrics::{CallEnd, Label};

#[derive(Clone, PartialEq, Message)]
struct Request {
    #[prost(message, repeated, tag = "1")]
    resource_spans: Vec<ResourceSpans>,
}

#[derive(Clone, PartialEq, Message)]
struct ResourceSpans {
    #[prost(message, optional, tag = "1")]
    resource: Option<Resource>,
    #[prost(message, repeated, tag = "2")]
    scope_spans: Vec<ScopeSpans>,
}

#[derive(Clone, PartialEq, Message)]
struct Resource {
    #[prost(message, repeated, tag = "1")]
    attributes: Vec<KeyValue>,
}

#[derive(Clone, PartialEq, Message)]
struct ScopeSpans {
    #[prost(message, optional, tag = "1")]
    scope: Option<Scope>,
    #[prost(message, repeated, tag = "2")]
    spans: Vec<Span>,
}

#[derive(Clone, PartialEq, Message)]
struct Scope {
    #[prost(string, tag = "1")]
    name: String,
    #[prost(string, tag = "2")]
    version: String,
}

#[derive(Clone, PartialEq, Message)]
struct Span {
    #[prost(bytes = "vec", tag = "1")]
    trace_id: Vec<u8>,
    #[prost(bytes = "vec", tag = "2")]
    span_id: Vec<u8>,
    #[prost(string, tag = "3")]
    trace_state: String,
    #[prost(bytes = "vec", tag = "4")]
    parent_span_id: Vec<u8>,
    #[prost(string, tag = "5")]
    name: String,
    #[prost(int32, tag = "6")]
    kind: i32,
    #[prost(fixed64, tag = "7")]
    start_time_unix_nano: u64,
    #[prost(fixed64, tag = "8")]
    end_time_unix_nano: u64,
    #[prost(message, repeated, tag = "9")]
    attributes: Vec<KeyValue>,
    #[prost(message, repeated, tag = "13")]
    links: Vec<Link>,
    #[prost(message, optional, tag = "15")]
    status: Option<Status>,
    #[prost(fixed32, tag = "16")]
    flags: u32,
}

#[derive(Clone, PartialEq, Message)]
struct Link {
    #[prost(bytes = "vec", tag = "1")]
    trace_id: Vec<u8>,
    #[prost(bytes = "vec", tag = "2")]
    span_id: Vec<u8>,
    #[prost(fixed32, tag = "6")]
    flags: u32,
}

#[derive(Clone, PartialEq, Message)]
struct Status {
    #[prost(int32, tag = "3")]
    code: i32,
}

#[derive(Clone, PartialEq, Message)]
struct KeyValue {
    #[prost(string, tag = "1")]
    key: String,
    #[prost(message, optional, tag = "2")]
    value: Option<AnyValue>,
}

#[derive(Clone, PartialEq, Message)]
struct AnyValue {
    #[prost(oneof = "Value", tags = "1, 3")]
    value: Option<Value>,
}

#[derive(Clone, PartialEq, prost::Oneof)]
enum Value {
    #[prost(string, tag = "1")]
    Text(String),
    #[prost(int64, tag = "3")]
    Number(i64),
}

#[derive(Clone, PartialEq, Message)]
struct Response {
    #[prost(message, optional, tag = "1")]
    partial_success: Option<PartialSuccess>,
}

#[derive(Clone, PartialEq, Message)]
struct PartialSuccess {
    #[prost(int64, tag = "1")]
    rejected_spans: i64,
}

/// `SPAN_KIND_SERVER`
const SERVER: i32 = 2;
/// `SPAN_KIND_CLIENT`
const CLIENT: i32 = 3;
/// `STATUS_CODE_ERROR`
const ERROR: i32 = 2;
/// `TRACE_FLAGS_SAMPLED`
const SAMPLED: u32 = 1;
/// `SPAN_FLAGS_CONTEXT_HAS_IS_REMOTE_MASK`: it is known whether the parent is another process's.
const KNOWS_PARENT: u32 = 0x100;
/// `SPAN_FLAGS_CONTEXT_IS_REMOTE_MASK`
const PARENT_IS_REMOTE: u32 = 0x200;

fn text(key: &str, value: impl Into<String>) -> KeyValue {
    KeyValue { key: key.to_owned(), value: Some(AnyValue { value: Some(Value::Text(value.into())) }) }
}

fn number(key: &str, value: i64) -> KeyValue {
    KeyValue { key: key.to_owned(), value: Some(AnyValue { value: Some(Value::Number(value)) }) }
}

/// An `ExportTraceServiceRequest` that holds these calls.
pub(super) fn request(resource: &BTreeMap<String, String>, calls: &[Traced]) -> Vec<u8> {
    let scope = Scope { name: env!("CARGO_PKG_NAME").into(), version: process::VERSION.into() };
    let attributes = resource.iter().map(|(key, value)| text(key, value)).collect();
    let spans = calls.iter().flat_map(|call| [Some(server_span(call)), client_span(call)]).flatten().collect();
    let scope_spans = vec![ScopeSpans { scope: Some(scope), spans }];
    let resource = Some(Resource { attributes });
    Request { resource_spans: vec![ResourceSpans { resource, scope_spans }] }.encode_to_vec()
}

/// How many spans an `ExportTraceServiceResponse` says it has not taken.
pub(super) fn rejected(response: &[u8]) -> u64 {
    let partial_success = Response::decode(response).ok().and_then(|response| response.partial_success);
    partial_success.and_then(|partial| partial.rejected_spans.try_into().ok()).unwrap_or_default()
}

/// What its client waited for: `tools/call`, by the semantic conventions for MCP. Not `jsonrpc.request.id`, which may
/// be any text of the client's.
fn server_span(call: &Traced) -> Span {
    let mut attributes = vec![
        text("mcp.method.name", "tools/call"),
        text("mcp.protocol.version", call.version),
        text("mcp.session.id", call.who.session.short().to_string()),
        text("gen_ai.operation.name", "execute_tool"),
        text("gen_ai.tool.name", &*call.tool),
        text("network.protocol.name", "http"),
        text("network.transport", "tcp"),
        text("openclaw.tenant", call.who.tenant.name()),
    ];
    attributes.extend(call.status.map(|status| number("http.response.status_code", status.as_u16().into())));
    attributes.extend(error_attributes(call));
    Span {
        trace_id: call.ids.trace.to_be_bytes().into(),
        span_id: call.ids.server.to_be_bytes().into(),
        trace_state: call.state.as_deref().unwrap_or_default().to_owned(),
        parent_span_id: call.parent.map_or(Vec::new(), |parent| parent.to_be_bytes().into()),
        name: format!("tools/call {}", call.tool),
        kind: SERVER,
        start_time_unix_nano: nanos(call.began),
        end_time_unix_nano: nanos(call.began + call.time),
        attributes,
        links: call.beside.map(link).into_iter().collect(),
        status: status(call),
        flags: SAMPLED | KNOWS_PARENT | if call.parent.is_some() { PARENT_IS_REMOTE } else { 0 },
    }
}

/// The way to the app, if the call got on it: `invoke_tool`.
fn client_span(call: &Traced) -> Option<Span> {
    let (start, end) = call.app?;
    let mut attributes = vec![
        text("mcp.session.id", call.who.session.short().to_string()),
        text("gen_ai.tool.name", &*call.tool),
        text("network.protocol.name", "websocket"),
    ];
    attributes.extend(error_attributes(call));
    Some(Span {
        trace_id: call.ids.trace.to_be_bytes().into(),
        span_id: call.ids.client.to_be_bytes().into(),
        trace_state: call.state.as_deref().unwrap_or_default().to_owned(),
        parent_span_id: call.ids.server.to_be_bytes().into(),
        name: format!("invoke_tool {}", call.tool),
        kind: CLIENT,
        start_time_unix_nano: nanos(call.began + start),
        end_time_unix_nano: nanos(call.began + end),
        attributes,
        links: Vec::new(),
        status: status(call),
        flags: SAMPLED | KNOWS_PARENT,
    })
}

fn error_attributes(call: &Traced) -> impl Iterator<Item = KeyValue> {
    // Our own JSON-RPC errors have their HTTP status as a code.
    let ours = call.status.filter(|status| !status.is_success()).map(|status| status.as_u16().into());
    let code = call.rpc_code.or(ours).map(|code| code.to_string());
    let kind = (call.end != CallEnd::Ok).then(|| code.clone().unwrap_or_else(|| call.end.word().to_owned()));
    let attributes =
        [kind.map(|kind| text("error.type", kind)), code.map(|code| text("rpc.response.status_code", code))];
    attributes.into_iter().flatten()
}

fn link(span: TraceParent) -> Link {
    Link {
        trace_id: span.trace_id.to_be_bytes().into(),
        span_id: span.span_id.to_be_bytes().into(),
        flags: u32::from(span.is_sampled) | KNOWS_PARENT | PARENT_IS_REMOTE,
    }
}

fn status(call: &Traced) -> Option<Status> {
    (call.end != CallEnd::Ok).then_some(Status { code: ERROR })
}

fn nanos(time: SystemTime) -> u64 {
    let since: Duration = time.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_nanos()).unwrap_or(u64::MAX)
}
