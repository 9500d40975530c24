//! What the status page shows, as JSON. Times are Unix seconds, durations milliseconds.

use std::collections::HashMap;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use serde_json::{Value, json};

use crate::process;
use crate::protocol::SessionId;
use crate::proxy::ProxyState;
use crate::proxy::metrics::{Counters, Histogram, Label};
use crate::proxy::records::RecentCall;
use crate::proxy::registry::Entry;

/// How many tenants and sessions are listed.
const LISTED: usize = 200;

/// All at a glance.
pub(super) fn status(state: &ProxyState) -> Value {
    let metrics = &state.records.metrics;
    let mut bridges: HashMap<String, usize> = HashMap::new();
    let mut sessions = Vec::new();
    let mut connected = 0;
    state.registry.each(|entry| {
        if entry.bridge.connection().0.is_some() {
            connected += 1;
            *bridges.entry(entry.owner.tenant.name().to_owned()).or_default() += 1;
        }
        if sessions.len() < LISTED {
            sessions.push(row(state, entry));
        }
    });
    let tenants = state.tenants.all();
    let listed = tenants.iter().take(LISTED).map(|tenant| {
        json!({
            "name": tenant.name(),
            "sessions": tenant.sessions().now(), "sessions_limit": tenant.sessions().limit(),
            "bridges": bridges.get(tenant.name()).copied().unwrap_or(0),
            "calls": tenant.calls().now(), "calls_limit": tenant.calls().limit(),
            "request_bytes": tenant.request_bytes().now(), "request_bytes_limit": tenant.request_bytes().limit(),
        })
    });
    json!({
        "version": process::VERSION,
        "now": unix(SystemTime::now()),
        "started": unix(state.started),
        "base_url": base_url(state),
        "draining": state.is_draining(),
        "sessions": { "now": state.registry.len(), "limit": state.config.max_sessions },
        "bridges": connected,
        "calls": { "now": state.calls.now(), "limit": state.config.max_calls },
        "request_bytes": { "now": state.request_bytes.now(), "limit": state.config.max_request_bytes },
        "connections": { "now": state.connections(), "limit": state.config.max_connections },
        "tenants": listed.collect::<Value>(),
        "tenants_in_all": tenants.len(),
        "session_list": sessions,
        "outcomes": counts(&metrics.calls),
        "limits": counts(&metrics.limits),
        "bridges_closed": counts(&metrics.bridges_closed),
        "apps_refused": counts(&metrics.apps_refused),
        "clients_refused": counts(&metrics.clients_refused),
        "bad_frames": metrics.bad_frames.get(),
        "results_ignored": metrics.results_ignored.get(),
        "call_time": times(&metrics.call_time),
        "app_time": times(&metrics.app_time),
        "proxy_time": times(&metrics.proxy_time),
        "ping_time": times(&metrics.ping_time),
    })
}

/// One session, with what its user needs to connect a client.
pub(super) fn session(state: &ProxyState, id: SessionId) -> Option<Value> {
    let entry = state.registry.get(id, Instant::now())?;
    let mut session = row(state, &entry);
    let registration = &entry.session.registration;
    session["app_version"] = registration.app_version.as_deref().into();
    session["tool_names"] = registration.tools.names().into();
    session["has_secret"] = entry.owner.secret.is_some().into();
    session["has_mcp_token"] = entry.owner.mcp_token.is_some().into();
    session["asks_for_token"] = state.tenants.asks_clients_for_token().into();
    session["mcp_url"] = format!("{}/v1/mcp/{id}", base_url(state)).into();
    Some(session)
}

/// A call that has ended.
pub(super) fn call(call: &RecentCall) -> Value {
    json!({
        "at": unix(call.at),
        "tenant": call.who.tenant.name(),
        "session": call.who.session.to_string(),
        "tool": call.tool,
        "outcome": call.end.word(),
        "request_bytes": call.request_bytes,
        "result_bytes": call.result_bytes,
        "ms": millis(call.time),
        "app_ms": call.app_time.map(millis),
    })
}

fn row(state: &ProxyState, entry: &Entry) -> Value {
    let (since, epoch) = entry.bridge.connection();
    let left = state.registry.expires_at(entry).map(|at| at.saturating_duration_since(Instant::now()).as_secs());
    let registration = &entry.session.registration;
    json!({
        "id": entry.session.id.to_string(),
        "tenant": entry.owner.tenant.name(),
        "device": registration.device_name.as_deref().unwrap_or(&registration.device_id),
        "tools": registration.tools.len(),
        "connected_seconds": since.map(|since| since.elapsed().as_secs()),
        "epoch": epoch,
        "calls": entry.bridge.calls_in_flight(),
        "expires_in_seconds": left,
    })
}

/// Where clients reach the proxy, as far as it knows without a request of theirs.
fn base_url(state: &ProxyState) -> String {
    match &state.config.public_url {
        Some(url) => url.base.clone(),
        None => state.address.tcp().map_or_else(|| "http://localhost".into(), |address| format!("http://{address}")),
    }
}

fn counts<L: Label>(counters: &Counters<L>) -> Value {
    L::ALL.iter().map(|kind| (kind.word().to_owned(), Value::from(counters.get(*kind)))).collect()
}

/// `[[upper bound in ms or null, count], …]` and the sum.
fn times(histogram: &Histogram) -> Value {
    let buckets = histogram.buckets().into_iter();
    let buckets = buckets.map(|(bound, count)| json!([bound.is_finite().then_some(bound * 1e3), count]));
    json!({ "buckets": buckets.collect::<Value>(), "sum": histogram.sum() * 1e3 })
}

fn unix(at: SystemTime) -> f64 {
    at.duration_since(UNIX_EPOCH).unwrap_or_default().as_secs_f64()
}

fn millis(time: Duration) -> f64 {
    (time.as_secs_f64() * 1e6).round() / 1e3
}
