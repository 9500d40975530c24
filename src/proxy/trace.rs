//! Traces: each call as two spans of OpenTelemetry, if the settings name a collector.
//!
//! | span | from | to |
//! |---|---|---|
//! | `tools/call <tool>`, a server's | the whole request is there | its answer |
//! | `invoke_tool <tool>`, a client's | the app gets the call | the app has answered, or the call has ended |
//!
//! The first is a child of the client's span, if it names one ([`context`]), the second one of the first. Apps with
//! the feature `context` get the second one's `traceparent`, so that their spans are its children. What is not kept
//! costs no more than the decision: the client's own context is passed on as it is, or, where there is none, one that says
//! that the trace is not kept. There is no span where the audit log has no line: requests that are malformed, tools that
//! do not exist.
//!
//! A span has what the audit log has of a call (`otlp`), never arguments and results. Ended ones wait in a bounded queue
//! for the one task that sends them ([`export`]); what does not fit is dropped and counted.

pub mod context;
pub mod export;
mod otlp;
pub mod settings;

use std::time::{Duration, Instant, SystemTime};

use http::StatusCode;
use tokio::sync::mpsc;

use crate::proxy::audit::Who;
use crate::proxy::metrics::{CallEnd, Metrics};
use context::{Origin, TraceParent};
use export::Exporter;
use settings::{Sampler, TraceSettings};

/// Decides which calls are traced, and follows them.
#[derive(Debug)]
pub struct Tracer {
    sampler: Sampler,
    queue: mpsc::Sender<Traced>,
}

/// Traces cannot be sent as the settings say.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub struct TraceError(String);

/// A tracer, and what sends the spans.
///
/// # Errors
/// [`TraceError`], if the collector can never be reached: a sentence.
pub fn open(settings: &TraceSettings) -> Result<(Tracer, Exporter), TraceError> {
    // A call is two spans, most often.
    let (sender, receiver) = mpsc::channel(settings.queue_spans / 2);
    let exporter = Exporter::new(settings.clone(), receiver).map_err(TraceError)?;
    Ok((Tracer { sampler: settings.sampler, queue: sender }, exporter))
}

/// The numbers by which a call's spans are known.
#[derive(Debug, Clone, Copy)]
struct Ids {
    trace: u128,
    server: u64,
    client: u64,
}

impl Ids {
    /// In this trace, or else in a new one.
    fn new(trace: Option<u128>) -> Option<Self> {
        let mut random = [0; 32];
        getrandom::fill(&mut random).ok()?;
        let [new_trace, spans] = [&random[..16], &random[16..]]
            .map(|half| half.iter().fold(0, |number, byte| number << 8 | u128::from(*byte)));
        // They must not be 0.
        let trace = trace.unwrap_or(new_trace | 1);
        Some(Ids { trace, server: (spans >> 64) as u64 | 1, client: spans as u64 | 1 })
    }
}

/// A call that is traced.
#[derive(Debug)]
pub struct CallTrace {
    traceparent: String,
    kept: Option<Box<Kept>>,
}

/// What is sent of it, as far as it is known, and what is needed to know the rest.
#[derive(Debug)]
struct Kept {
    call: Traced,
    since: Instant,
    is_started: bool,
    app_ended: Option<Instant>,
}

/// A call that has ended, to be told.
#[derive(Debug)]
struct Traced {
    ids: Ids,
    /// The client's span.
    parent: Option<u64>,
    /// The `tracestate` that came with it.
    state: Option<Box<str>>,
    /// The span of the HTTP request, if it is another one.
    beside: Option<TraceParent>,
    who: Who,
    tool: Box<str>,
    /// The protocol version.
    version: &'static str,
    began: SystemTime,
    time: Duration,
    /// When it was on its way to the app, counted from the beginning; `None` if it never was.
    app: Option<(Duration, Duration)>,
    end: CallEnd,
    /// The code of the app's JSON-RPC error.
    rpc_code: Option<i64>,
    /// What the client was answered, if it was.
    status: Option<StatusCode>,
}

impl Traced {
    fn spans(&self) -> u64 {
        1 + u64::from(self.app.is_some())
    }
}

impl Tracer {
    /// Follows a call, unless its client's context is to be passed on as it is.
    pub fn begin(
        &self,
        origin: &Origin<'_>,
        who: impl FnOnce() -> Who,
        tool: &str,
        version: &'static str,
    ) -> Option<CallTrace> {
        let parent = origin.parent;
        let follow = |is_sampled: bool, ids: Ids| {
            let traceparent = TraceParent { trace_id: ids.trace, span_id: ids.client, is_sampled }.to_string();
            let call = || Traced {
                ids,
                parent: parent.map(|parent| parent.span_id),
                state: origin.state.as_deref().map(Into::into),
                beside: origin.beside,
                who: who(),
                tool: tool.into(),
                version,
                began: SystemTime::now(),
                time: Duration::ZERO,
                app: None,
                end: CallEnd::Ok,
                rpc_code: None,
                status: None,
            };
            let keep = |call| Box::new(Kept { call, since: Instant::now(), is_started: false, app_ended: None });
            CallTrace { traceparent, kept: is_sampled.then(|| keep(call())) }
        };
        match parent {
            Some(parent) if !self.sampler.keeps(parent.trace_id, Some(parent.is_sampled)) => None,
            Some(parent) => Some(follow(true, Ids::new(Some(parent.trace_id))?)),
            None => {
                let ids = Ids::new(None)?;
                Some(follow(self.sampler.keeps(ids.trace, None), ids))
            }
        }
    }

    /// A call has ended. `app_time` is what passed between the app's getting it and its answer, if it did answer.
    pub fn end(&self, trace: CallTrace, end: CallEnd, app_time: Option<Duration>, metrics: &Metrics) {
        let Some(kept) = trace.kept else { return };
        let Kept { mut call, since, is_started, app_ended } = *kept;
        call.time = since.elapsed();
        call.end = end;
        let app_end = app_ended.map_or(call.time, |ended| ended.duration_since(since));
        let app_start = app_time.map_or(Duration::ZERO, |time| app_end.saturating_sub(time));
        call.app = is_started.then_some((app_start, app_end));
        if let Err(full) = self.queue.try_send(call) {
            metrics.trace_spans_dropped.add(full.into_inner().spans());
        }
    }
}

impl CallTrace {
    /// The span in which the app is called, as text.
    pub fn traceparent(&self) -> &str {
        &self.traceparent
    }

    /// The call is on its way to the app.
    pub fn started(&mut self) {
        if let Some(kept) = &mut self.kept {
            kept.is_started = true;
        }
    }

    /// The app has answered, or will not; with which code, if it is a JSON-RPC error.
    pub fn app_ended(&mut self, rpc_code: Option<i64>) {
        if let Some(kept) = &mut self.kept {
            kept.app_ended = Some(Instant::now());
            kept.call.rpc_code = rpc_code;
        }
    }

    /// The client is answered so.
    pub fn answered(&mut self, status: StatusCode) {
        if let Some(kept) = &mut self.kept {
            kept.call.status = Some(status);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_two_calls_have_the_same_numbers_and_none_is_zero() {
        let ids: Vec<Ids> = (0..1000).map(|_| Ids::new(None).unwrap()).collect();
        let distinct: std::collections::HashSet<u64> = ids.iter().flat_map(|ids| [ids.server, ids.client]).collect();
        assert_eq!(distinct.len(), 2000);
        assert!(!distinct.contains(&0) && ids.iter().all(|ids| ids.trace != 0));
        // All of their bits are random but the last.
        assert_eq!(ids.iter().fold(u128::MAX, |all, ids| all & ids.trace), 1);
        assert_eq!(ids.iter().fold(0, |all, ids| all | ids.trace), u128::MAX);
        assert_eq!(Ids::new(Some(7)).unwrap().trace, 7);
    }
}
