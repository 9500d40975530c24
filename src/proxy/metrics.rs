//! What happens, counted: for Prometheus and for the status page.
//!
//! Labels have few values, all known here, so that nothing grows with tenants, sessions or tools. Everything is an
//! atomic number: counting takes no lock and no memory.

use std::marker::PhantomData;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use crate::protocol::Close;

/// A label whose values are the variants of an enum.
pub trait Label: Copy + Send + Sync + 'static {
    /// All values.
    const ALL: &'static [Self];

    /// The value as a word.
    fn word(self) -> &'static str;

    /// Its place in [`Label::ALL`].
    fn index(self) -> usize;
}

macro_rules! label {
    ($(#[$doc:meta])* $name:ident { $($(#[$variant_doc:meta])* $variant:ident = $word:literal,)+ }) => {
        $(#[$doc])*
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
        pub enum $name { $($(#[$variant_doc])* $variant,)+ }

        impl Label for $name {
            const ALL: &'static [Self] = &[$($name::$variant,)+];

            fn word(self) -> &'static str {
                match self { $($name::$variant => $word,)+ }
            }

            fn index(self) -> usize {
                self as usize
            }
        }
    };
}

label! {
    /// How a call ended.
    CallEnd {
        /// With the app's result.
        Ok = "ok",
        /// The tool failed, says the app.
        ToolError = "tool_error",
        /// The app answered with a JSON-RPC error.
        RpcError = "rpc_error",
        /// No app was there.
        NotConnected = "not_connected",
        /// The app's socket went while it had the call.
        Lost = "lost",
        /// The app had the call and did not come back in time.
        NotResumed = "not_resumed",
        /// The app did not come back in time to get the call.
        NotDelivered = "not_delivered",
        /// Its time was over.
        Timeout = "timeout",
        /// Its client cancelled it.
        Cancelled = "cancelled",
        /// Its client went away.
        ClientGone = "client_gone",
        /// Its session was deleted.
        SessionDeleted = "session_deleted",
        /// The proxy stops.
        ShuttingDown = "shutting_down",
        /// Its session has too many calls, or too large ones.
        Busy = "busy",
        /// Its tenant has.
        TenantBusy = "tenant_busy",
        /// All together have.
        ProxyBusy = "proxy_busy",
        /// The app reads too slowly.
        QueueFull = "queue_full",
        /// The result is larger than allowed.
        ResultTooLarge = "result_too_large",
        /// The app's answer cannot be used.
        Malformed = "malformed",
    }
}

label! {
    /// How a session ended.
    SessionEnd {
        /// Its app deleted it.
        Deleted = "deleted",
        /// Its app was away for too long.
        Expired = "expired",
        /// Its tenant is gone.
        Revoked = "revoked",
        /// The proxy stops, and sessions end with it.
        Shutdown = "shutdown",
    }
}

label! {
    /// Why a socket is a bridge no longer, or never became one.
    BridgeEnd {
        /// The app closed it, or the connection broke.
        Gone = "gone",
        /// The session was deleted.
        Deleted = "deleted",
        /// Too many bad frames.
        Policy = "policy",
        /// The proxy stops.
        Restart = "restart",
        /// No valid token.
        Unauthorized = "unauthorized",
        /// No such session.
        UnknownSession = "unknown_session",
        /// Another one is connected.
        AlreadyConnected = "already_connected",
        /// A newer one took over.
        Replaced = "replaced",
        /// Nothing came for two ping intervals.
        Silent = "silent",
        /// The app did not read.
        Stalled = "stalled",
        /// A message was too large.
        TooLarge = "too_large",
        /// A message took too long.
        TooSlow = "too_slow",
        /// There was no room for a message.
        NoRoom = "no_room",
    }
}

label! {
    /// Who asked.
    Side {
        /// An app.
        App = "app",
        /// An MCP client.
        Client = "client",
    }
}

label! {
    /// Why somebody was not let in.
    Refused {
        /// 400, 403: headers that are doubled, or name a host or an origin that is not served.
        Gate = "gate",
        /// 401: no valid token.
        Token = "token",
        /// 429, 503: too much.
        Limit = "limit",
        /// The session is another tenant's, or its own token is asked for.
        ForeignSession = "foreign_session",
        /// The session's secret is missing or another one.
        SessionSecret = "session_secret",
        /// 503: the proxy stops.
        Stopping = "stopping",
    }
}

label! {
    /// A bound of the settings; its word is the setting's name without `OPENCLAW_PROXY_`, in small letters.
    Limit {
        /// `MAX_TOOLS`
        Tools = "max_tools",
        /// `MAX_TOOL_BYTES`
        ToolBytes = "max_tool_bytes",
        /// `MAX_TOOLS_BYTES`
        ToolsBytes = "max_tools_bytes",
        /// `MAX_PARAM_HEADERS`
        ParamHeaders = "max_param_headers",
        /// `MAX_INSTRUCTIONS_BYTES`
        InstructionsBytes = "max_instructions_bytes",
        /// `MAX_BODY_BYTES`
        BodyBytes = "max_body_bytes",
        /// `MAX_RESULT_BYTES`
        ResultBytes = "max_result_bytes",
        /// `MAX_PROGRESS_BYTES`
        ProgressBytes = "max_progress_bytes",
        /// `MAX_BRIDGE_MESSAGE_BYTES`
        BridgeMessageBytes = "max_bridge_message_bytes",
        /// `MAX_QUEUE_BYTES`
        QueueBytes = "max_queue_bytes",
        /// `MAX_JSON_DEPTH`
        JsonDepth = "max_json_depth",
        /// `MAX_CALLS_PER_SESSION`
        CallsPerSession = "max_calls_per_session",
        /// `MAX_CALLS_PER_TENANT`
        CallsPerTenant = "max_calls_per_tenant",
        /// `MAX_CALLS`
        Calls = "max_calls",
        /// `MAX_CALL_BYTES_PER_SESSION`
        CallBytesPerSession = "max_call_bytes_per_session",
        /// `MAX_REQUEST_BYTES_PER_TENANT`
        RequestBytesPerTenant = "max_request_bytes_per_tenant",
        /// `MAX_REQUEST_BYTES`
        RequestBytes = "max_request_bytes",
        /// `MAX_LISTENERS_PER_SESSION`
        ListenersPerSession = "max_listeners_per_session",
        /// `MAX_SESSIONS_PER_TENANT`
        SessionsPerTenant = "max_sessions_per_tenant",
        /// `MAX_SESSIONS`
        Sessions = "max_sessions",
        /// `MAX_BATCH`
        Batch = "max_batch",
        /// `MAX_BAD_FRAMES`
        BadFrames = "max_bad_frames",
        /// `MAX_TOOL_UPDATES_PER_MINUTE`
        ToolUpdates = "max_tool_updates_per_minute",
        /// `MAX_REQUESTS_PER_SECOND_PER_ADDRESS`
        RequestsPerAddress = "max_requests_per_second_per_address",
        /// `MAX_REQUESTS_PER_SECOND_PER_TENANT`
        RequestsPerTenant = "max_requests_per_second_per_tenant",
        /// `MAX_DENIALS_PER_SECOND_PER_ADDRESS`
        DenialsPerAddress = "max_denials_per_second_per_address",
        /// `MAX_REFUSED_SOCKETS`
        RefusedSockets = "max_refused_sockets",
        /// `MAX_HEADER_BYTES`
        HeaderBytes = "max_header_bytes",
        /// `MAX_CONNECTIONS`
        Connections = "max_connections",
        /// `MAX_CONNECTIONS_PER_ADDRESS`
        ConnectionsPerAddress = "max_connections_per_address",
        /// `MAX_ADMIN_CONNECTIONS`
        AdminConnections = "max_admin_connections",
    }
}

impl From<Close> for BridgeEnd {
    fn from(close: Close) -> Self {
        match close {
            Close::Deleted => BridgeEnd::Deleted,
            Close::Policy => BridgeEnd::Policy,
            Close::Restart { .. } => BridgeEnd::Restart,
            Close::Unauthorized => BridgeEnd::Unauthorized,
            Close::UnknownSession => BridgeEnd::UnknownSession,
            Close::AlreadyConnected => BridgeEnd::AlreadyConnected,
            Close::Replaced => BridgeEnd::Replaced,
            Close::Silent => BridgeEnd::Silent,
            Close::Stalled => BridgeEnd::Stalled,
            Close::TooLarge => BridgeEnd::TooLarge,
            Close::TooSlow => BridgeEnd::TooSlow,
            Close::NoRoom => BridgeEnd::NoRoom,
        }
    }
}

/// A number that only grows.
#[derive(Debug, Default)]
pub struct Counter(AtomicU64);

impl Counter {
    /// One more.
    pub fn count(&self) {
        self.add(1);
    }

    /// So many more.
    pub fn add(&self, count: u64) {
        self.0.fetch_add(count, Ordering::Relaxed);
    }

    /// How many.
    pub fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

/// A counter for each value of a label.
#[derive(Debug)]
pub struct Counters<L> {
    counters: Box<[Counter]>,
    label: PhantomData<L>,
}

impl<L: Label> Default for Counters<L> {
    fn default() -> Self {
        Counters { counters: L::ALL.iter().map(|_| Counter::default()).collect(), label: PhantomData }
    }
}

impl<L: Label> Counters<L> {
    /// One more of this kind.
    pub fn count(&self, kind: L) {
        self.counters[kind.index()].count();
    }

    /// How many of this kind.
    pub fn get(&self, kind: L) -> u64 {
        self.counters[kind.index()].get()
    }
}

/// How long things took: how many fell between bounds, and all of them together.
#[derive(Debug)]
pub struct Histogram {
    /// Upper bounds in microseconds.
    bounds: &'static [u64],
    /// One more than bounds.
    counts: Box<[AtomicU64]>,
    nanos: AtomicU64,
}

impl Histogram {
    fn new(bounds: &'static [u64]) -> Self {
        let counts = (0..=bounds.len()).map(|_| AtomicU64::new(0)).collect();
        Histogram { bounds, counts, nanos: AtomicU64::new(0) }
    }

    /// It took so long.
    pub fn observe(&self, time: Duration) {
        let micros = u64::try_from(time.as_micros()).unwrap_or(u64::MAX);
        let bucket = self.bounds.partition_point(|bound| *bound < micros);
        self.counts[bucket].fetch_add(1, Ordering::Relaxed);
        self.nanos.fetch_add(u64::try_from(time.as_nanos()).unwrap_or(u64::MAX), Ordering::Relaxed);
    }

    /// Upper bounds in seconds, the last one infinite, each with how many fell below it and above the one before.
    pub fn buckets(&self) -> Vec<(f64, u64)> {
        let bounds = self.bounds.iter().map(|micros| *micros as f64 / 1e6).chain([f64::INFINITY]);
        bounds.zip(&self.counts).map(|(bound, count)| (bound, count.load(Ordering::Relaxed))).collect()
    }

    /// All of them together, in seconds.
    pub fn sum(&self) -> f64 {
        self.nanos.load(Ordering::Relaxed) as f64 / 1e9
    }
}

/// From a millisecond to the longest that a call may sensibly take.
const CALL_BOUNDS: &[u64] = &[
    1_000,
    2_500,
    5_000,
    10_000,
    25_000,
    50_000,
    100_000,
    250_000,
    500_000,
    1_000_000,
    2_500_000,
    5_000_000,
    10_000_000,
    30_000_000,
    60_000_000,
    120_000_000,
    300_000_000,
];
/// From what a call costs the proxy to where something is wrong with it.
const PROXY_BOUNDS: &[u64] =
    &[50, 100, 250, 500, 1_000, 2_500, 5_000, 10_000, 25_000, 50_000, 100_000, 250_000, 1_000_000, 5_000_000];

/// All that is counted.
#[derive(Debug)]
pub struct Metrics {
    /// Calls, by how they ended.
    pub calls: Counters<CallEnd>,
    /// How long answered calls took, from the whole request to the answer.
    pub call_time: Histogram,
    /// What of it passed between the app's getting the call and its answer.
    pub app_time: Histogram,
    /// The rest.
    pub proxy_time: Histogram,
    /// Sessions that were registered.
    pub sessions_created: Counter,
    /// Sessions that ended, by how.
    pub sessions_ended: Counters<SessionEnd>,
    /// Sockets that became bridges.
    pub bridges_attached: Counter,
    /// Sockets that are bridges no longer.
    pub bridges_detached: Counter,
    /// Those, and sockets that never became bridges, by why.
    pub bridges_closed: Counters<BridgeEnd>,
    /// How long apps took to answer a ping.
    pub ping_time: Histogram,
    /// Text frames from apps.
    pub frames_received: Counter,
    /// Their bytes.
    pub bytes_received: Counter,
    /// Text frames to apps.
    pub frames_sent: Counter,
    /// Their bytes.
    pub bytes_sent: Counter,
    /// Requests of apps that were not let in, by why.
    pub apps_refused: Counters<Refused>,
    /// Requests of MCP clients that were not let in, by why.
    pub clients_refused: Counters<Refused>,
    /// How often each bound was met.
    pub limits: Counters<Limit>,
    /// Results for calls that are unknown, finished or another session's.
    pub results_ignored: Counter,
    /// Frames that were no valid bridge messages.
    pub bad_frames: Counter,
    /// Attempts to write the state file that failed.
    pub state_file_errors: Counter,
    /// Spans that the collector has taken.
    pub trace_spans_sent: Counter,
    /// Spans that are lost: no room to wait, no collector, or it did not want them.
    pub trace_spans_dropped: Counter,
}

impl Metrics {
    /// How many bridges there are.
    pub fn bridges(&self) -> u64 {
        // One that comes and goes in between must not make it negative.
        let detached = self.bridges_detached.get();
        self.bridges_attached.get().saturating_sub(detached)
    }
}

impl Default for Metrics {
    fn default() -> Self {
        Metrics {
            calls: Counters::default(),
            call_time: Histogram::new(CALL_BOUNDS),
            app_time: Histogram::new(CALL_BOUNDS),
            proxy_time: Histogram::new(PROXY_BOUNDS),
            sessions_created: Counter::default(),
            sessions_ended: Counters::default(),
            bridges_attached: Counter::default(),
            bridges_detached: Counter::default(),
            bridges_closed: Counters::default(),
            ping_time: Histogram::new(CALL_BOUNDS),
            frames_received: Counter::default(),
            bytes_received: Counter::default(),
            frames_sent: Counter::default(),
            bytes_sent: Counter::default(),
            apps_refused: Counters::default(),
            clients_refused: Counters::default(),
            limits: Counters::default(),
            results_ignored: Counter::default(),
            bad_frames: Counter::default(),
            state_file_errors: Counter::default(),
            trace_spans_sent: Counter::default(),
            trace_spans_dropped: Counter::default(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words_are_distinct<L: Label>() {
        let words: std::collections::BTreeSet<&str> = L::ALL.iter().map(|label| label.word()).collect();
        assert_eq!(words.len(), L::ALL.len());
        assert!(L::ALL.iter().enumerate().all(|(index, label)| label.index() == index));
    }

    #[test]
    fn labels_have_distinct_words() {
        words_are_distinct::<CallEnd>();
        words_are_distinct::<SessionEnd>();
        words_are_distinct::<BridgeEnd>();
        words_are_distinct::<Limit>();
        words_are_distinct::<Side>();
        words_are_distinct::<Refused>();
    }

    #[test]
    fn every_bound_of_the_settings_is_a_limit_that_is_counted() {
        let names = include_str!("../../.env.example").lines().filter_map(|line| {
            let name = line.strip_prefix("# OPENCLAW_PROXY_MAX_")?.split('=').next()?;
            Some(format!("max_{}", name.to_lowercase()))
        });
        let mut names: Vec<String> = names.collect();
        let mut words: Vec<String> = Limit::ALL.iter().map(|limit| limit.word().to_owned()).collect();
        names.sort();
        words.sort();
        assert_eq!(names, words);
    }

    #[test]
    fn a_time_falls_into_the_first_bucket_that_holds_it() {
        let histogram = Histogram::new(&[10, 100]);
        for micros in [0, 10, 11, 100, 101, 1_000_000] {
            histogram.observe(Duration::from_micros(micros));
        }
        assert_eq!(histogram.buckets(), [(1e-5, 2), (1e-4, 2), (f64::INFINITY, 2)]);
        assert!((histogram.sum() - 1.000_222).abs() < 1e-9);
    }
}
