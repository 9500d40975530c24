//! What happened: counted, written into the audit log, and kept a while for the status page.

use std::collections::VecDeque;
use std::net::IpAddr;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant, SystemTime};

use crate::proxy::audit::{self, Who};
use crate::proxy::metrics::{BridgeEnd, CallEnd, Label, Limit, Metrics, Refused, SessionEnd, Side};
use crate::proxy::refusals::{Refusal, Refusals};
use crate::proxy::trace::{CallTrace, Tracer};

/// Where everything that happens is told.
#[derive(Debug, Default)]
pub struct Records {
    /// The counts.
    pub metrics: Metrics,
    recent: Option<Recent>,
    refusals: Refusals,
    tracer: Option<Tracer>,
}

/// The last calls, without what they contained.
#[derive(Debug)]
pub struct Recent {
    most: usize,
    calls: Mutex<Calls>,
}

#[derive(Debug, Default)]
struct Calls {
    /// How many there have been.
    count: u64,
    last: VecDeque<RecentCall>,
}

/// A call that has ended.
#[derive(Debug, Clone)]
pub struct RecentCall {
    /// When it began.
    pub at: SystemTime,
    /// Whose session.
    pub who: Who,
    /// The tool's name.
    pub tool: Box<str>,
    /// How it ended.
    pub end: CallEnd,
    /// The bytes of its arguments.
    pub request_bytes: usize,
    /// The bytes of its result.
    pub result_bytes: usize,
    /// How long it took.
    pub time: Duration,
    /// What of it passed between the app's getting it and its answer.
    pub app_time: Option<Duration>,
}

impl Recent {
    fn calls(&self) -> MutexGuard<'_, Calls> {
        self.calls.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn push(&self, call: RecentCall) {
        let mut calls = self.calls();
        calls.count += 1;
        calls.last.push_back(call);
        if calls.last.len() > self.most {
            calls.last.pop_front();
        }
    }

    /// The calls after the first `seen` ones, as far as they are kept, the oldest first; and how many there have been.
    pub fn since(&self, seen: u64) -> (Vec<RecentCall>, u64) {
        let calls = self.calls();
        let new = usize::try_from(calls.count.saturating_sub(seen)).unwrap_or(usize::MAX).min(calls.last.len());
        (calls.last.iter().skip(calls.last.len() - new).cloned().collect(), calls.count)
    }
}

impl Records {
    /// Keeps the last `recent` calls, if any are to be kept, and traces them with `tracer`, if they are to be traced.
    pub fn new(recent: Option<usize>, tracer: Option<Tracer>) -> Self {
        let recent = recent.map(|most| Recent { most, calls: Mutex::default() });
        Records { recent, tracer, ..Records::default() }
    }

    /// What traces calls, if they are traced.
    pub fn tracer(&self) -> Option<&Tracer> {
        self.tracer.as_ref()
    }

    /// The last calls, if they are kept.
    pub fn recent(&self) -> Option<&Recent> {
        self.recent.as_ref()
    }

    /// A bound was met.
    pub fn limit(&self, limit: Limit) {
        self.metrics.limits.count(limit);
    }

    /// A session was registered.
    pub fn session_created(&self, who: &Who, tools: usize) {
        self.metrics.sessions_created.count();
        audit::created(who, tools);
    }

    /// A session ended.
    pub fn session_ended(&self, who: &Who, end: SessionEnd) {
        self.metrics.sessions_ended.count(end);
        audit::ended(who, end.word());
    }

    /// An app's socket became its session's bridge.
    pub fn bridge_attached(&self, who: &Who, epoch: u64, address: IpAddr) {
        self.metrics.bridges_attached.count();
        let _unbounded = who.tenant.bridges().take();
        audit::attached(who, epoch, address);
    }

    /// It is that no longer.
    pub fn bridge_detached(&self, who: &Who, epoch: u64, end: BridgeEnd, since: Instant) {
        self.metrics.bridges_detached.count();
        who.tenant.bridges().give_back();
        self.bridge_closed(end);
        audit::detached(who, epoch, end.word(), since);
    }

    /// An app's socket was closed, whether it was a bridge or not.
    pub fn bridge_closed(&self, end: BridgeEnd) {
        self.metrics.bridges_closed.count(end);
        match end {
            BridgeEnd::Policy => self.limit(Limit::BadFrames),
            BridgeEnd::TooLarge => self.limit(Limit::BridgeMessageBytes),
            _ => {}
        }
    }

    /// Somebody was not let in, or had too much. `status` is what it was told: an HTTP status, or a close code.
    pub fn refused(&self, side: Side, address: IpAddr, status: impl Into<u16>, why: Refused) {
        match side {
            Side::App => self.metrics.apps_refused.count(why),
            Side::Client => self.metrics.clients_refused.count(why),
        }
        let refusal = Refusal { side, address, status: status.into(), why };
        if audit::is_on()
            && let Some(told) = self.refusals.count(refusal, Instant::now())
        {
            audit::refused(&told);
        }
    }

    /// Tells of the refusals that are due at `now`; to be called every second.
    pub fn tell_refusals(&self, now: Instant) {
        self.refusals.due(now).iter().for_each(audit::refused);
    }

    /// A call begins.
    pub fn call_begins(&self, who: impl FnOnce() -> Who, tool: &str, arguments: &str, now: Instant) -> CallRecord {
        // Most often nobody wants to know more than how long it takes.
        let detail = (self.recent.is_some() || audit::is_on()).then(|| (who(), tool.into(), SystemTime::now()));
        CallRecord { detail, request_bytes: arguments.len(), since: now, trace: None }
    }

    /// A call has ended. `app_time` is what passed between the app's getting it and its answer, if it did answer.
    pub fn call_ended(&self, call: CallRecord, end: CallEnd, result_bytes: usize, app_time: Option<Duration>) {
        let CallRecord { detail, request_bytes, since, trace } = call;
        let time = since.elapsed();
        if let Some((trace, tracer)) = trace.zip(self.tracer()) {
            tracer.end(trace, end, app_time, &self.metrics);
        }
        self.metrics.calls.count(end);
        if let Some(app_time) = app_time {
            self.metrics.call_time.observe(time);
            self.metrics.app_time.observe(app_time);
            self.metrics.proxy_time.observe(time.saturating_sub(app_time));
        }
        let Some((who, tool, at)) = detail else { return };
        let call = RecentCall { at, who, tool, end, request_bytes, result_bytes, time, app_time };
        audit::called(&call);
        if let Some(recent) = &self.recent {
            recent.push(call);
        }
    }
}

/// A call that runs.
#[derive(Debug)]
pub struct CallRecord {
    detail: Option<(Who, Box<str>, SystemTime)>,
    request_bytes: usize,
    since: Instant,
    /// Its spans, if it has any.
    pub trace: Option<CallTrace>,
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::protocol::SessionId;
    use crate::proxy::tenants::Tenant;

    #[test]
    fn the_last_calls_are_kept_and_no_more() {
        let records = Records::new(Some(3), None);
        let who = Who { tenant: std::sync::Arc::new(Tenant::new("t")), session: SessionId::random() };
        let call = |n: u64| {
            let begun = records.call_begins(|| who.clone(), &n.to_string(), "{}", Instant::now());
            records.call_ended(begun, CallEnd::Ok, 1, Some(Duration::ZERO));
        };
        let since = |seen| {
            let (calls, count) = records.recent().unwrap().since(seen);
            (calls.into_iter().map(|call| call.tool.into_string()).collect::<Vec<_>>().join(" "), count)
        };
        assert_eq!(since(0), (String::new(), 0));
        (1..=2).for_each(call);
        assert_eq!(since(0), ("1 2".into(), 2));
        assert_eq!(since(2), (String::new(), 2));
        (3..=5).for_each(call);
        assert_eq!(since(0), ("3 4 5".into(), 5));
        assert_eq!(since(4), ("5".into(), 5));
        assert_eq!(since(9), (String::new(), 5));
        assert_eq!(records.metrics.calls.get(CallEnd::Ok), 5);
    }
}
