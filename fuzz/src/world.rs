//! A session with an app and a client, all of it real but the sockets.

use std::collections::BTreeMap;
use std::future::poll_fn;
use std::sync::{Arc, Mutex, PoisonError};
use std::task::Poll;
use std::time::{Duration, Instant};

use bytes::Bytes;
use http::{HeaderMap, HeaderValue};
use openclaw_mcp_proxy::mcp::listen::Listeners;
use openclaw_mcp_proxy::mcp::{self, Answer, AnswerSettings, CallParams, Era, NotCalled, ToolView, Tools, dispatch};
use openclaw_mcp_proxy::protocol::{Context, SessionId};
use openclaw_mcp_proxy::proxy::bridge::{Attempt, Bridge, BridgeLimits, Call, CallRequest, Next, Received};
use openclaw_mcp_proxy::proxy::session::{Registration, Session, ToolLimits};
use serde_json::Value;
use tokio::runtime::{Builder, Runtime};

use super::{DEPTH, json};

/// The bounds of registrations, as they are unless set otherwise.
pub(super) const TOOL_LIMITS: ToolLimits = ToolLimits {
    tools: 512,
    tool_bytes: 64 * 1024,
    tools_bytes: 2 * 1024 * 1024,
    param_headers: 64,
    instructions_bytes: 64 * 1024,
    json_depth: DEPTH,
};

/// The session that the corpus's frames name.
pub(super) const SESSION: &str = "0123456789abcdef0123456789abcdef";

const LIMITS: BridgeLimits = BridgeLimits {
    calls: 4,
    call_bytes: 1024 * 1024,
    queue_bytes: 1024 * 1024,
    result_bytes: 1024 * 1024,
    progress_bytes: 1024,
    json_depth: DEPTH,
    resume_grace: Duration::from_secs(15),
};

const ANSWERS: AnswerSettings = AnswerSettings {
    // Everything is answered without waiting, so this passes only if an answer is missing.
    stream_after: Duration::from_secs(60),
    keep_alive: Duration::from_secs(60),
    max_result_bytes: 4 * 1024 * 1024,
};

thread_local! {
    static RUNTIME: Runtime = Builder::new_current_thread().enable_time().build().expect("a runtime starts");
}

/// The session, its bridge, and the epoch of the socket that is connected.
pub(super) struct World {
    session: Arc<Session>,
    pub(super) bridge: Arc<Bridge>,
    pub(super) epoch: u64,
    pub(super) now: Instant,
    listeners: Listeners,
}

/// The session of an app with these features; it is registered once.
fn session(features: &'static str) -> Arc<Session> {
    static SESSIONS: Mutex<BTreeMap<&str, Arc<Session>>> = Mutex::new(BTreeMap::new());
    let register = || {
        let registration = format!(
            r#"{{"device_id":"d","device_name":"D","instructions":"i","bridge_features":{features},"tools":[
                    {{"name":"echo"}},
                    {{"name":"strict","output_schema":{{"type":"object"}}}},
                    {{"name":"any","output_schema":{{}}}},
                    {{"name":"region","input_schema":{{"properties":{{"r":{{"type":"string","x-mcp-header":"Region"}}}}}}}}]}}"#
        );
        let registration = Registration::parse(&registration, &TOOL_LIMITS).expect("it is a good one");
        Arc::new(Session::new(SessionId::random(), registration))
    };
    let mut sessions = SESSIONS.lock().unwrap_or_else(PoisonError::into_inner);
    Arc::clone(sessions.entry(features).or_insert_with(register))
}

impl World {
    /// `features` is the text of the array `bridge_features`.
    pub(super) fn new(features: &'static str) -> Self {
        let session = session(features);
        let now = Instant::now();
        let id = SessionId::parse(SESSION).expect("it is one");
        let (spelling, features) = (session.registration.spelling, session.registration.features);
        let bridge = Arc::new(Bridge::new(id, spelling, features, LIMITS, Arc::default(), now));
        let Attempt::Attached(epoch) = bridge.try_attach(None, now) else { panic!("nobody else is there") };
        World { session, bridge, epoch, now, listeners: Listeners::new(1) }
    }

    /// The next frame to the app, if there is one.
    pub(super) fn next_frame(&self) -> Option<Value> {
        match self.bridge.next_frame(self.epoch, self.now, std::task::Waker::noop()) {
            Next::Send(frame) => Some(json(frame)),
            Next::Idle => None,
            other => panic!("{other:?}"),
        }
    }

    /// The app says something.
    pub(super) fn say<'a>(&self, text: &'a str) -> Received<'a> {
        let message = Bytes::copy_from_slice(text.as_bytes());
        let copy = std::str::from_utf8(&message).expect("it is a copy of a text");
        match self.bridge.receive(self.epoch, &message, copy, Ok(None), self.now) {
            Received::Done => Received::Done,
            Received::Bad(why) => Received::Bad(why),
            Received::UpdateTools(tools) => {
                super::assert_slice(tools, copy);
                let at = tools.as_ptr() as usize - copy.as_ptr() as usize;
                Received::UpdateTools(&text[at..at + tools.len()])
            }
        }
    }

    /// What the client gets for a request, while the app does with its calls what `app` says.
    pub(super) fn ask(
        &self,
        request: &mcp::Request<'_>,
        mut app: impl FnMut(&Self, Value),
    ) -> (http::StatusCode, Value) {
        let lending = poll_fn(|context| {
            loop {
                match self.bridge.next_frame(self.epoch, self.now, context.waker()) {
                    Next::Send(frame) => app(self, json(frame)),
                    Next::Idle => return Poll::<std::convert::Infallible>::Pending,
                    other => panic!("{other:?}"),
                }
            }
        });
        let answer = RUNTIME.with(|runtime| {
            runtime.block_on(async {
                tokio::select! {
                    biased;
                    answer = dispatch(request, Some(self), &ANSWERS) => answer,
                    never = lending => match never {},
                }
            })
        });
        match answer {
            Answer::Json(status, body) => (status, json(body)),
            Answer::List(pieces) => (http::StatusCode::OK, json(pieces.concat())),
            Answer::Stream(_) => panic!("the call was answered at once"),
            Answer::Listen(_) => (http::StatusCode::OK, Value::Null),
        }
    }
}

impl Tools for World {
    type Call = Call;

    fn server_info(&self) -> &Bytes {
        &self.session.server_info
    }

    fn instructions(&self) -> Option<&str> {
        self.session.registration.instructions.as_deref()
    }

    fn list(&self, era: Era) -> &Bytes {
        match era {
            Era::Legacy(_) => self.session.registration.tools.legacy_list(),
            Era::Modern(_) => self.session.registration.tools.modern_list(),
        }
    }

    fn tool(&self, name: &str) -> Option<ToolView<'_>> {
        let tool = self.session.registration.tools.get(name)?;
        Some(ToolView { output: tool.output, param_headers: &tool.param_headers })
    }

    fn call(&self, call: CallParams<'_>) -> Result<Call, NotCalled> {
        let request = CallRequest {
            client_id: call.id,
            tool: call.name,
            arguments: call.arguments,
            kept_bytes: call.arguments.len(),
            progress: call.progress,
            context: Context {
                protocol_version: call.era.version(),
                meta: call.params.meta.as_ref().map(|meta| meta.text),
                client_info: call.params.client_info,
                input_responses: call.params.input_responses,
                request_state: call.params.request_state,
                ..Context::default()
            },
            timeout: Duration::from_secs(120),
            cancel_on_drop: true,
        };
        self.bridge.call(request, self.now).map_err(NotCalled::from)
    }

    fn listeners(&self, _: Era) -> Option<&Listeners> {
        Some(&self.listeners)
    }
}

/// The headers with which a 2026-07-28 client would send this message; others need none.
pub(super) fn headers_for(message: &Value) -> HeaderMap {
    let mut headers = HeaderMap::new();
    let params = &message["params"];
    let repeated = [
        ("mcp-protocol-version", &params["_meta"]["io.modelcontextprotocol/protocolVersion"]),
        ("mcp-method", &message["method"]),
        ("mcp-name", &params["name"]),
        ("mcp-param-region", &params["arguments"]["r"]),
    ];
    for (name, value) in repeated {
        if let Some(value) = value.as_str().and_then(|value| HeaderValue::from_str(value).ok())
            && params["_meta"].is_object()
        {
            headers.insert(name, value);
        }
    }
    headers
}
