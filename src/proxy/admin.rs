//! What the operator sees, on a listener of its own:
//!
//! - `GET /` the status page, one file that needs nothing else
//! - `GET /events` what the page shows, as server-sent events: `history` at first, then `status` and `calls`
//! - `GET /status.json` the same once, for scripts
//! - `GET /sessions.json?filter=` sessions that match, and how many there are
//! - `GET /sessions/{id}.json` one session
//! - `GET /metrics` for Prometheus
//! - `GET /ready` whether new requests are welcome; `GET /health` whether the process is alive
//!
//! Nothing can be changed here, and nothing of what calls contain is shown. The last two ask for no token.

mod exposition;
mod history;
mod status;

use std::convert::Infallible;
use std::sync::{Arc, LazyLock, Mutex, PoisonError};
use std::time::{Duration, Instant};

use axum::Router;
use axum::extract::State;
use axum::middleware::{Next, from_fn_with_state};
use axum::response::{Html, IntoResponse, Response};
use axum::routing::get;
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use bytes::Bytes;
use futures_util::StreamExt;
use futures_util::stream::{once, unfold};
use http::header::{AUTHORIZATION, CACHE_CONTROL, CONTENT_SECURITY_POLICY, CONTENT_TYPE, WWW_AUTHENTICATE};
use http::{HeaderMap, HeaderValue, StatusCode};
use sha2::{Digest, Sha256};

use crate::auth::{TokenHash, bearer_token};
use crate::protocol::SessionId;
use crate::proxy::error::{ApiError, respond};
use crate::proxy::{ProxyState, Request, gate};
use history::History;

/// How often the page gets news.
const TICK: Duration = Duration::from_millis(500);
/// The status page.
const PAGE: &str = include_str!("admin/page.html");
/// What it may do: run its own script and no other, ask this listener, and load nothing. Names of devices and tools
/// come from strangers, so no text becomes HTML, whatever the script does. No other page may frame it.
static PAGE_POLICY: LazyLock<HeaderValue> = LazyLock::new(|| {
    let script = PAGE.split_once("<script>").and_then(|(_, rest)| rest.split_once("</script>"));
    let hash = STANDARD.encode(Sha256::digest(script.map_or("", |(script, _)| script)));
    let policy = format!(
        "default-src 'none'; script-src 'sha256-{hash}'; style-src 'unsafe-inline'; img-src data:; connect-src 'self'; \
         require-trusted-types-for 'script'; trusted-types 'none'; base-uri 'none'; form-action 'none'; \
         frame-ancestors 'none'"
    );
    HeaderValue::try_from(policy).expect("it is ASCII")
});

/// What the operator's listener has beside the proxy's own state.
#[derive(Debug)]
pub struct Admin {
    state: Arc<ProxyState>,
    history: History,
    /// What was last shown, and when it was made: those who look at the same time see the same.
    shown: Mutex<Option<(Instant, Arc<str>)>>,
}

impl Admin {
    /// Shows this proxy.
    pub fn new(state: Arc<ProxyState>) -> Self {
        Admin { state, history: History::default(), shown: Mutex::default() }
    }

    /// Notes what happens, until it is dropped.
    pub async fn keep_history(&self) {
        self.history.keep(&self.state).await;
    }

    /// The status, made at most once a [`TICK`], however many look at it.
    fn status(&self) -> Arc<str> {
        let mut shown = self.shown.lock().unwrap_or_else(PoisonError::into_inner);
        match &*shown {
            Some((at, status)) if at.elapsed() < TICK => Arc::clone(status),
            _ => {
                let status: Arc<str> = status::status(&self.state).to_string().into();
                *shown = Some((Instant::now(), Arc::clone(&status)));
                status
            }
        }
    }
}

/// The router of the operator's listener.
pub fn router(admin: Arc<Admin>) -> Router {
    let state = Arc::clone(&admin.state);
    Router::new()
        .route("/events", get(events))
        .with_state(admin)
        .route("/", get(page))
        .route("/status.json", get(status_json))
        .route("/sessions.json", get(sessions_json))
        .route("/sessions/{file}", get(session_json))
        .route("/metrics", get(metrics))
        .layer(from_fn_with_state(Arc::clone(&state), gate))
        .route("/ready", get(ready))
        .route("/health", get(async || "ok"))
        .fallback(async || ApiError::new(StatusCode::NOT_FOUND, "There is nothing at this path."))
        .with_state(state)
}

/// Whether new requests are welcome: 200 `ready`, or 503 `draining`.
pub async fn ready(State(state): State<Arc<ProxyState>>) -> Response {
    match state.is_draining() {
        false => "ready".into_response(),
        true => (StatusCode::SERVICE_UNAVAILABLE, "draining").into_response(),
    }
}

/// Lets in who has the token. Where none is asked for, a page that rebinds its name to this address is kept out.
async fn gate(State(state): State<Arc<ProxyState>>, request: Request, next: Next) -> Response {
    let token = &state.config.admin_token;
    if token.is_empty() {
        let is_loopback = state.config.admin_listen.is_some_and(|address| address.ip().is_loopback());
        if is_loopback && !gate::names_loopback(request.headers()) {
            return ApiError::new(StatusCode::FORBIDDEN, "This Host is not served here.").into_response();
        }
        return next.run(request).await;
    }
    let given = credentials(request.headers());
    let is_known = given.is_some_and(|given| TokenHash::of(&given).matches(&TokenHash::of(token.expose().as_bytes())));
    if is_known {
        return next.run(request).await;
    }
    let mut refusal =
        ApiError::new(StatusCode::UNAUTHORIZED, "OPENCLAW_PROXY_ADMIN_TOKEN is asked for.").into_response();
    // Browsers ask their user.
    let challenge = HeaderValue::from_static(r#"Basic realm="OpenClaw MCP Proxy", charset="UTF-8""#);
    refusal.headers_mut().insert(WWW_AUTHENTICATE, challenge);
    refusal
}

/// The token of `Authorization`: a bearer's, or a password.
fn credentials(headers: &HeaderMap) -> Option<Vec<u8>> {
    if let Some(token) = bearer_token(headers) {
        return Some(token.to_vec());
    }
    let (scheme, encoded) = headers.get(AUTHORIZATION)?.as_bytes().split_at_checked(6)?;
    let decoded = STANDARD.decode(encoded.trim_ascii()).ok().filter(|_| scheme.eq_ignore_ascii_case(b"basic "))?;
    let colon = decoded.iter().position(|byte| *byte == b':')?;
    Some(decoded[colon + 1..].to_vec())
}

async fn page() -> Response {
    let mut response = Html(PAGE).into_response();
    let headers = response.headers_mut();
    headers.insert(CONTENT_SECURITY_POLICY, PAGE_POLICY.clone());
    headers.insert("x-content-type-options", HeaderValue::from_static("nosniff"));
    headers.insert("referrer-policy", HeaderValue::from_static("no-referrer"));
    headers.insert(CACHE_CONTROL, HeaderValue::from_static("no-cache"));
    response
}

async fn metrics(State(state): State<Arc<ProxyState>>) -> Response {
    match exposition::render(state) {
        Ok(text) => ([(CONTENT_TYPE, exposition::CONTENT_TYPE)], text).into_response(),
        Err(error) => {
            tracing::error!(%error, "the metrics cannot be written");
            ApiError::new(StatusCode::INTERNAL_SERVER_ERROR, "The metrics cannot be written.").into_response()
        }
    }
}

async fn status_json(State(state): State<Arc<ProxyState>>) -> Response {
    respond(StatusCode::OK, status::status(&state).to_string())
}

async fn sessions_json(State(state): State<Arc<ProxyState>>, request: Request) -> Response {
    let query = request.uri().query().unwrap_or_default();
    let filter = url::form_urlencoded::parse(query.as_bytes()).find(|(name, _)| name == "filter");
    let filter = filter.map(|(_, filter)| filter).unwrap_or_default();
    respond(StatusCode::OK, status::search(&state, &filter).to_string())
}

async fn session_json(State(state): State<Arc<ProxyState>>, request: Request) -> Response {
    let id = request.uri().path().strip_prefix("/sessions/").and_then(|file| file.strip_suffix(".json"));
    match id.and_then(SessionId::parse).and_then(|id| status::session(&state, id)) {
        Some(session) => respond(StatusCode::OK, session.to_string()),
        None => ApiError::unknown_session().into_response(),
    }
}

/// `history` at first, `status` every second, and `calls` that have ended whenever there are some.
async fn events(State(admin): State<Arc<Admin>>) -> Response {
    let mut ticks = tokio::time::interval(TICK);
    ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    let closing = admin.state.closing.clone();
    let begin = event("history", &admin.history.to_json());
    let stream = unfold((admin, ticks, 0_u64, true), |(admin, mut ticks, seen, wants_status)| async move {
        ticks.tick().await;
        let mut events = String::new();
        if wants_status {
            events += &event("status", &admin.status());
        }
        let (calls, count) = admin.state.records.recent().map(|recent| recent.since(seen)).unwrap_or_default();
        if !calls.is_empty() {
            let numbers = count - calls.len() as u64 + 1..;
            let calls: serde_json::Value =
                numbers.zip(&calls).map(|(number, call)| status::call(number, call)).collect();
            events += &event("calls", &calls.to_string());
        }
        if events.is_empty() {
            events.push_str(":\n\n");
        }
        Some((events, (admin, ticks, count, !wants_status)))
    });
    let stream = once(async { begin }).chain(stream).map(|events| Ok::<_, Infallible>(Bytes::from(events)));
    let stream = stream.take_until(closing.cancelled_owned());
    let mut response = Response::new(axum::body::Body::from_stream(stream));
    let headers = response.headers_mut();
    headers.insert(CONTENT_TYPE, HeaderValue::from_static("text/event-stream"));
    headers.insert(CACHE_CONTROL, HeaderValue::from_static("no-cache"));
    headers.insert("x-accel-buffering", HeaderValue::from_static("no"));
    response
}

/// An event. JSON as it is written here has no line breaks.
fn event(name: &str, data: &str) -> String {
    format!("event: {name}\ndata: {data}\n\n")
}
