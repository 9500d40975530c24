//! What apps do: register, look at, change and delete a session, and connect its bridge.
//!
//! - `POST /v1/chat/sessions`
//! - `GET`, `DELETE /v1/chat/sessions/{id}`
//! - `PUT /v1/chat/sessions/{id}/tools`
//! - `GET /v1/chat/sessions/{id}/bridge`, upgraded to a WebSocket

use std::borrow::Cow;
use std::net::IpAddr;
use std::sync::Arc;
use std::time::{Instant, SystemTime};

use axum::extract::State;
use axum::response::Response;
use base64::Engine;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use http::header::{
    AUTHORIZATION, CONNECTION, HeaderName, SEC_WEBSOCKET_ACCEPT, SEC_WEBSOCKET_KEY, SEC_WEBSOCKET_PROTOCOL,
    SEC_WEBSOCKET_VERSION, UPGRADE,
};
use http::{HeaderMap, HeaderValue, Method, StatusCode, Version};
use hyper_util::rt::TokioIo;
use tokio::sync::OwnedSemaphorePermit;
use tokio_tungstenite::tungstenite::handshake::derive_accept_key;

use crate::auth::{self, Denied, TokenHash, new_token};
use crate::json::{self, JsonError};
use crate::protocol::{
    BEARER_SUBPROTOCOL_PREFIX, BRIDGE_SUBPROTOCOL, Close, SECRET_SUBPROTOCOL_PREFIX, SESSION_SECRET_HEADER, SessionId,
};
use crate::proxy::audit::Who;
use crate::proxy::bridge::socket::{self, Life};
use crate::proxy::connection::ClientStream;
use crate::proxy::error::{ApiError, respond};
use crate::proxy::gate;
use crate::proxy::listener::Stream;
use crate::proxy::memory::Share;
use crate::proxy::metrics::{Limit, Refused, SessionEnd, Side};
use crate::proxy::registry::{Entry, Full, Owner};
use crate::proxy::session::{Registration, Rejected, ToolSet, tools_member};
use crate::proxy::tenants::{AppCaller, Role};
use crate::proxy::{Peer, ProxyState, Request, audit, body};

type Result<T = Response> = std::result::Result<T, ApiError>;

/// `POST /v1/chat/sessions`: registers a session with its tools.
pub async fn create(State(state): State<Arc<ProxyState>>, request: Request) -> Result {
    let caller = caller_of(&request)?;
    let ip = state.client_ip(request.extensions(), request.headers());
    let (parts, request_body) = request.into_parts();
    if state.is_draining() {
        state.records.refused(Side::App, ip, StatusCode::SERVICE_UNAVAILABLE, Refused::Stopping);
        return Err(ApiError::new(
            StatusCode::SERVICE_UNAVAILABLE,
            "The proxy is shutting down; retry in a few seconds.",
        ));
    }
    let (body, caller) = json_body(&state, ip, caller, &parts.headers, request_body).await?;
    let text = checked_json(&state, &body)?;
    let mut registration =
        Registration::parse(text, &state.config.tool_limits()).map_err(|rejected| unprocessable(&state, rejected))?;
    let warnings = std::mem::take(&mut registration.tools.warnings);
    let no_random = |error: std::io::Error| {
        tracing::error!(%error, "no random numbers");
        ApiError::new(StatusCode::SERVICE_UNAVAILABLE, "No secret can be made now; retry later.")
    };
    let make = |wanted: bool| wanted.then(new_token).transpose().map_err(no_random);
    let secret = make(registration.wants_session_secret || state.config.require_session_secret)?;
    let mcp_token = make(registration.wants_mcp_token)?;
    let hash = |token: &Option<String>| token.as_ref().map(|token| TokenHash::of(token.as_bytes()));
    let owner = Owner { tenant: caller.tenant, secret: hash(&secret), mcp_token: hash(&mcp_token) };
    let entry = state.registry.create(registration, owner, Instant::now()).map_err(|full| {
        let (status, limit, whose) = match full {
            Full::Tenant(limit) => (StatusCode::TOO_MANY_REQUESTS, limit, "this tenant may have"),
            Full::Everybody(limit) => (StatusCode::SERVICE_UNAVAILABLE, limit, "allowed"),
        };
        state.records.refused(Side::App, ip, status, Refused::Limit);
        ApiError::new(status, format!("There are {limit} chat sessions already, as many as {whose}; retry later."))
    })?;
    let session = &entry.session;
    tracing::info!(
        session.id = %session.id.short(),
        tenant = entry.owner.tenant.name(),
        device.id = ?session.registration.device_id,
        device.name = ?session.registration.device_name,
        app.version = ?session.registration.app_version,
        tools = session.registration.tools.len(),
        "session registered"
    );
    state.records.session_created(&entry.who(), session.registration.tools.len());
    // Its tenant may have gone just now, after which nobody has looked at the sessions.
    if !state.tenants.has(&entry.owner.tenant) {
        state.enforce_tenants();
        state.records.refused(Side::App, ip, StatusCode::UNAUTHORIZED, Refused::Token);
        return Err(Denied::Invalid.into());
    }
    let peer = parts.extensions.get::<Peer>().map_or(std::net::Ipv4Addr::UNSPECIFIED.into(), |peer| peer.ip);
    let base = gate::public_base(&state.config, &parts.headers, peer);
    // http gives ws, https gives wss.
    let ws_base = format!("ws{}", base.strip_prefix("http").unwrap_or_default());
    let id = session.id;
    let mut answer = serde_json::json!({
        "mcpSessionId": id.to_string(),
        "bridge_url": format!("{ws_base}/v1/chat/sessions/{id}/bridge"),
        "mcp_url": format!("{base}/v1/mcp/{id}"),
    });
    if let Some(secret) = secret {
        answer["session_secret"] = secret.into();
    }
    if let Some(token) = mcp_token {
        answer["mcp_token"] = token.into();
    }
    if !warnings.is_empty() {
        answer["warnings"] = warnings.into();
    }
    Ok(respond(StatusCode::OK, answer.to_string().into_bytes()))
}

/// `GET /v1/chat/sessions/{id}`: what the app may know of its session. No sign of life.
pub async fn show(State(state): State<Arc<ProxyState>>, request: Request) -> Result {
    let entry = find(&state, &request, &caller_of(&request)?, StatusCode::NOT_FOUND)?;
    let (connection, epoch) = entry.bridge.connection();
    let now = Instant::now();
    let unix_time = |since: Instant| {
        let at = SystemTime::now().checked_sub(now.duration_since(since))?;
        Some(at.duration_since(SystemTime::UNIX_EPOCH).ok()?.as_secs())
    };
    let seconds_left = state.registry.expires_at(&entry).map(|at| at.saturating_duration_since(now).as_secs());
    let answer = serde_json::json!({
        "mcpSessionId": entry.session.id.to_string(),
        "bridge": {
            "connected": connection.is_some(),
            "since": connection.and_then(|connection| unix_time(connection.since)),
            "epoch": epoch,
        },
        "tools": entry.session.registration.tools.len(),
        "calls_in_flight": entry.bridge.calls_in_flight(),
        "expires_in_seconds": seconds_left,
    });
    Ok(respond(StatusCode::OK, answer.to_string().into_bytes()))
}

/// `DELETE /v1/chat/sessions/{id}`: ends a session. Idempotent, so that a retried goodbye is no error.
pub async fn delete(State(state): State<Arc<ProxyState>>, request: Request) -> Result {
    let caller = caller_of(&request)?;
    // Whoever may not delete it reads what is read of a session that does not exist.
    if let Ok(entry) = find(&state, &request, &caller, StatusCode::OK)
        && state.registry.delete(entry.session.id)
    {
        tracing::info!(session.id = %entry.session.id.short(), "session deleted");
        state.records.session_ended(&entry.who(), SessionEnd::Deleted);
    }
    Ok(respond(StatusCode::OK, br#"{"ok":true}"#.to_vec()))
}

/// `PUT /v1/chat/sessions/{id}/tools`: replaces the tools, all or none.
pub async fn put_tools(State(state): State<Arc<ProxyState>>, request: Request) -> Result {
    let caller = caller_of(&request)?;
    let (request, request_body) = split(request);
    let ip = state.client_ip(request.extensions(), request.headers());
    let (body, caller) = json_body(&state, ip, caller, request.headers(), request_body).await?;
    let entry = find(&state, &request, &caller, StatusCode::NOT_FOUND)?;
    let text = checked_json(&state, &body)?;
    let tools = tools_member(text, state.config.max_json_depth);
    let tools = tools.map_err(|error| unprocessable(&state, error.into()))?;
    let (count, warnings) = update_tools(&state, &entry.who(), tools)?;
    let mut answer = serde_json::json!({ "ok": true, "tools": count });
    if !warnings.is_empty() {
        answer["warnings"] = warnings.into();
    }
    Ok(respond(StatusCode::OK, answer.to_string().into_bytes()))
}

fn update_tools(state: &ProxyState, who: &Who, tools: &str) -> Result<(usize, Vec<String>)> {
    // Before they are looked at, for that is what costs; a change that is refused counts as well.
    state.rates.tool_update(who.session)?;
    let tools = ToolSet::parse(tools, &state.config.tool_limits());
    let mut tools = tools.map_err(|rejected| unprocessable(state, rejected))?;
    let (count, warnings) = (tools.len(), std::mem::take(&mut tools.warnings));
    let id = who.session;
    if !state.registry.update_tools(id, tools, Instant::now()) {
        return Err(ApiError::unknown_session());
    }
    tracing::info!(session.id = %id.short(), tools = count, "tools updated");
    audit::tools_changed(who, count);
    Ok((count, warnings))
}

/// `GET /v1/chat/sessions/{id}/bridge`: the WebSocket over which the app lends its tools.
///
/// A client that may not have it is upgraded all the same and then closed with a code that says why.
pub async fn bridge(State(state): State<Arc<ProxyState>>, mut request: Request) -> Result {
    let ip = state.client_ip(request.extensions(), request.headers());
    let caller = caller_of(&request);
    let refuse_token = |status: u16| state.records.refused(Side::App, ip, status, Refused::Token);
    let accept = websocket_accept(&request).inspect_err(|error| {
        if caller.is_err() {
            refuse_token(error.status().as_u16());
        }
    })?;
    let id = session_in_path(&request);
    let found = match &caller {
        Err(_) => Err(Close::Unauthorized),
        Ok(caller) => id
            .and_then(|id| state.registry.of_app(id, caller, Instant::now()))
            .map(|entry| {
                let newcomer = socket::begin(&entry.bridge, caller.token, &state.graces());
                // Not the whole entry: the tools that it has now would outlive their change.
                (entry.who(), entry.bridge, newcomer)
            })
            .ok_or(Close::UnknownSession),
    };
    // A socket that is open only to be refused takes one of a few places; a status tells the rest.
    let place = found.is_err().then(|| take_refused_place(&state)).flatten();
    let has_place = place.is_some();
    let verdict = match (found, caller) {
        (Err(close), Err(denied)) => {
            refuse_token(if has_place { close.code() } else { StatusCode::UNAUTHORIZED.as_u16() });
            if has_place { Err(close) } else { return Err(denied) }
        }
        (Err(close), Ok(caller)) => {
            let status = if has_place { close.code() } else { StatusCode::NOT_FOUND.as_u16() };
            tell_foreign(&state, ip, id, &caller, status);
            if has_place { Err(close) } else { return Err(ApiError::unknown_session()) }
        }
        (Ok(found), _) => Ok(found),
    };
    let connection = request.extensions().get::<Peer>().cloned();
    let upgrade = hyper::upgrade::on(&mut request);
    let mut response = Response::new(axum::body::Body::empty());
    *response.status_mut() = StatusCode::SWITCHING_PROTOCOLS;
    let headers = response.headers_mut();
    headers.insert(CONNECTION, HeaderValue::from_static("upgrade"));
    headers.insert(UPGRADE, HeaderValue::from_static("websocket"));
    headers.insert(SEC_WEBSOCKET_ACCEPT, accept);
    if offered_protocols(request.headers()).any(|protocol| protocol == BRIDGE_SUBPROTOCOL) {
        headers.insert(SEC_WEBSOCKET_PROTOCOL, HeaderValue::from_static(BRIDGE_SUBPROTOCOL));
    }
    let tasks = state.tasks.clone();
    tasks.spawn(async move {
        // Hold the connection's place among the allowed ones, and among those that are refused.
        let (_connection, _place) = (connection, place);
        let upgraded = match tokio::time::timeout(state.config.header_timeout.0, upgrade).await {
            Ok(Ok(upgraded)) => upgraded,
            Ok(Err(error)) => return tracing::debug!(%error, "upgrade failed"),
            Err(_) => return tracing::debug!("upgrade timed out"),
        };
        // Past hyper's own buffers, to the bare connection.
        let Ok(parts) = upgraded.downcast::<TokioIo<ClientStream<Stream>>>() else {
            return tracing::error!("a connection is of another kind than those that are accepted");
        };
        let stream = parts.io.into_inner().upgraded(parts.read_buf);
        let settings = state.socket_settings();
        let websocket = socket::server_socket(stream, settings.max_message_bytes);
        match verdict {
            Err(close) => {
                state.records.bridge_closed(close.into());
                socket::refuse(websocket, close).await;
            }
            Ok((who, bridge, newcomer)) => {
                let opens = |token: Option<&TokenHash>| state.tenants.opens(Role::App, token, &who.tenant);
                let update = |tools: &str| {
                    update_tools(&state, &who, tools).map(|(count, _)| count).map_err(ApiError::into_detail)
                };
                let tell = |life| match life {
                    Life::Refused(close) => state.records.bridge_closed(close.into()),
                    Life::Attached { epoch } => {
                        state.records.bridge_attached(&who, epoch, ip);
                        // Its token may have gone since it was looked at.
                        bridge.cut_unless(opens);
                    }
                    Life::Detached { epoch, end, since } => state.records.bridge_detached(&who, epoch, end, since),
                };
                let room = Share::new(Some(&who.tenant), &state.request_bytes);
                socket::run(websocket, newcomer, settings, room, update, tell).await;
            }
        }
    });
    Ok(response)
}

/// A place among the sockets that are open only to be refused.
fn take_refused_place(state: &ProxyState) -> Option<OwnedSemaphorePermit> {
    let place = Arc::clone(&state.refused_sockets).try_acquire_owned().ok();
    if place.is_none() {
        state.records.limit(Limit::RefusedSockets);
    }
    place
}

/// Checks the opening handshake (RFC 6455 section 4.2.1) and gives the value that accepts it.
fn websocket_accept(request: &Request) -> Result<HeaderValue> {
    // axum routes HEAD here as well.
    if request.method() != Method::GET || request.version() != Version::HTTP_11 {
        return Err(ApiError::new(StatusCode::BAD_REQUEST, "A WebSocket begins with a GET of HTTP/1.1."));
    }
    let headers = request.headers();
    let has_token = |name: HeaderName, token: &str| {
        let values = headers.get_all(name).iter().filter_map(|value| value.to_str().ok());
        values.flat_map(|value| value.split(',')).any(|value| value.trim().eq_ignore_ascii_case(token))
    };
    if !has_token(CONNECTION, "upgrade") || !has_token(UPGRADE, "websocket") {
        let detail = "A WebSocket is expected here; a reverse proxy in front must forward 'Upgrade' and 'Connection'.";
        return Err(ApiError::new(StatusCode::UPGRADE_REQUIRED, detail));
    }
    if !has_token(SEC_WEBSOCKET_VERSION, "13") {
        return Err(ApiError::new(StatusCode::BAD_REQUEST, "Sec-WebSocket-Version must be 13."));
    }
    let key = headers.get(SEC_WEBSOCKET_KEY).filter(|key| key.len() == 24);
    let key =
        key.ok_or_else(|| ApiError::new(StatusCode::BAD_REQUEST, "Sec-WebSocket-Key is missing or not valid."))?;
    HeaderValue::try_from(derive_accept_key(key.as_bytes()))
        .map_err(|_| ApiError::new(StatusCode::BAD_REQUEST, "Sec-WebSocket-Key is not valid."))
}

fn offered_protocols(headers: &HeaderMap) -> impl Iterator<Item = &str> {
    let values = headers.get_all(SEC_WEBSOCKET_PROTOCOL).iter().filter_map(|value| value.to_str().ok());
    values.flat_map(|value| value.split(',')).map(str::trim)
}

/// Who an app is: by the headers of its request, or, for browsers, which cannot set any for a WebSocket, by the
/// subprotocols that it offers.
///
/// # Errors
/// [`Denied`] if its token is nobody's.
pub fn caller(state: &ProxyState, headers: &HeaderMap) -> std::result::Result<AppCaller, Denied> {
    let offered = |prefix: &str| {
        let encoded = offered_protocols(headers).find_map(|protocol| protocol.strip_prefix(prefix))?;
        // As with the header, nothing is no token.
        URL_SAFE_NO_PAD.decode(encoded.trim_end_matches('=')).ok().filter(|decoded| !decoded.is_empty())
    };
    let token = match headers.contains_key(AUTHORIZATION) {
        true => auth::bearer_token(headers).map(Cow::Borrowed),
        false => offered(BEARER_SUBPROTOCOL_PREFIX).map(Cow::Owned),
    };
    let secret = match headers.get(SESSION_SECRET_HEADER) {
        Some(secret) => Some(Cow::Borrowed(secret.as_bytes())),
        None => offered(SECRET_SUBPROTOCOL_PREFIX).map(Cow::Owned),
    };
    Ok(AppCaller {
        tenant: state.tenants.find(Role::App, token.as_deref())?,
        token: token.as_deref().map(TokenHash::of),
        secret: secret.map(|secret| TokenHash::of(&secret)),
    })
}

/// Who the app is, as the gate has found out.
fn caller_of(request: &Request) -> Result<AppCaller> {
    match request.extensions().get::<std::result::Result<AppCaller, Denied>>() {
        Some(caller) => Ok(caller.clone()?),
        None => Err(Denied::Missing.into()),
    }
}

/// A request without its body, and that.
fn split(request: Request) -> (Request, axum::body::Body) {
    let (parts, request_body) = request.into_parts();
    (Request::from_parts(parts, axum::body::Body::empty()), request_body)
}

/// Reads the body, and looks again who its sender is: that may have changed while it came.
async fn json_body(
    state: &ProxyState,
    ip: IpAddr,
    caller: AppCaller,
    headers: &HeaderMap,
    request_body: axum::body::Body,
) -> Result<(body::Held, AppCaller)> {
    if let Err(refusal) = gate::check_json_body(headers) {
        body::discard(request_body, &state.config).await;
        return Err(refusal.into());
    }
    let body = body::read(headers, request_body, state, Some(&caller.tenant)).await.inspect_err(|refusal| {
        if matches!(refusal.status, StatusCode::TOO_MANY_REQUESTS | StatusCode::SERVICE_UNAVAILABLE) {
            state.records.refused(Side::App, ip, refusal.status, Refused::Limit);
        }
    })?;
    let caller = self::caller(state, headers).inspect_err(|_| {
        state.records.refused(Side::App, ip, StatusCode::UNAUTHORIZED, Refused::Token);
    })?;
    Ok((body, caller))
}

fn checked_json<'a>(state: &ProxyState, body: &'a [u8]) -> Result<&'a str> {
    let bad = |detail: String| ApiError::new(StatusCode::BAD_REQUEST, detail);
    let text = std::str::from_utf8(body).map_err(|_| bad("The body is not valid UTF-8.".into()))?;
    json::check(text, state.config.max_json_depth).map_err(|error| {
        if matches!(error, JsonError::TooDeep { .. }) {
            state.records.limit(Limit::JsonDepth);
        }
        bad(format!("The body is refused: {error}."))
    })?;
    Ok(text)
}

fn unprocessable(state: &ProxyState, rejected: Rejected) -> ApiError {
    if let Some(limit) = rejected.limit {
        state.records.limit(limit);
    }
    ApiError::new(StatusCode::UNPROCESSABLE_ENTITY, rejected.detail)
}

/// The id in `/v1/chat/sessions/{id}…`. Not percent-decoded: our ids need no such encoding.
fn session_in_path(request: &Request) -> Option<SessionId> {
    request.uri().path().split('/').nth(4).and_then(SessionId::parse)
}

/// Whether the path is `/v1/chat/sessions/{id}/bridge`.
pub fn is_bridge_path(path: &str) -> bool {
    let mut rest = path.split('/').skip(4);
    rest.next().is_some() && rest.next() == Some("bridge") && rest.next().is_none()
}

/// The session in the path, if the caller may use it; `status` is what it is told if not.
fn find(state: &ProxyState, request: &Request, caller: &AppCaller, status: StatusCode) -> Result<Entry> {
    let id = session_in_path(request);
    let entry = id.and_then(|id| state.registry.of_app(id, caller, Instant::now()));
    entry.ok_or_else(|| {
        let ip = state.client_ip(request.extensions(), request.headers());
        tell_foreign(state, ip, id, caller, status.as_u16());
        ApiError::unknown_session()
    })
}

/// An app was told that there is no such session. If there is, it was refused.
fn tell_foreign(state: &ProxyState, ip: IpAddr, id: Option<SessionId>, caller: &AppCaller, status: u16) {
    if let Some(entry) = id.and_then(|id| state.registry.get(id, Instant::now())) {
        let is_of = entry.owner.is_of(caller);
        let why = if is_of { Refused::SessionSecret } else { Refused::ForeignSession };
        state.records.refused(Side::App, ip, status, why);
    }
}
