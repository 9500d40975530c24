//! The numbers in Prometheus's text format. README lists them.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, NoLabelSet, prometheus_text};
use prometheus_client::metrics::MetricType;
use prometheus_client::registry::Registry;
use sysinfo::{Pid, ProcessRefreshKind, ProcessesToUpdate, System};

use crate::process;
use crate::proxy::ProxyState;
use crate::proxy::metrics::{Counter, Counters, Histogram, Label};

pub(super) use prometheus_text::CONTENT_TYPE;

/// All numbers as they are now.
///
/// # Errors
/// If the encoder refuses one.
pub(super) fn render(state: Arc<ProxyState>) -> Result<String, fmt::Error> {
    let mut text = String::new();
    let mut registry = Registry::with_prefix("openclaw_proxy");
    registry.register_collector(Box::new(Proxy(state)));
    prometheus_text::encode(&mut text, &registry)?;
    let mut registry = Registry::default();
    registry.register_collector(Box::new(Process));
    prometheus_text::encode(&mut text, &registry)?;
    Ok(text)
}

#[derive(Debug)]
struct Proxy(Arc<ProxyState>);

impl Collector for Proxy {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> fmt::Result {
        let state = &self.0;
        let metrics = &state.records.metrics;
        let mut writer = Writer(&mut encoder);
        let build = [("version", process::VERSION)];
        writer.0.encode_descriptor("build", "What runs here", None, MetricType::Info)?.encode_info(&build)?;
        writer.gauge("draining", "Whether the process is stopping", usize::from(state.is_draining()))?;
        for (name, help, now, most) in [
            ("sessions", "Sessions", state.registry.len(), state.config.max_sessions),
            ("calls_in_flight", "Calls in flight", state.calls.now(), state.config.max_calls),
            (
                "request_bytes",
                "Bytes of large requests in memory",
                state.request_bytes.now(),
                state.config.max_request_bytes,
            ),
            ("connections", "Connections", state.connections(), state.config.max_connections),
        ] {
            writer.gauge(name, help, now)?;
            writer.gauge(&format!("{name}_limit"), &format!("{help}: the most there may be"), most)?;
        }
        writer.gauge("bridges", "Connected bridges", usize::try_from(metrics.bridges()).unwrap_or(usize::MAX))?;
        writer.gauge("tenants", "Tenants", state.tenants.all().len())?;
        writer.counters("calls", "Calls, by how they ended", "outcome", &metrics.calls)?;
        writer.histogram("call_seconds", "How long answered calls took in all", &metrics.call_time)?;
        writer.histogram("call_app_seconds", "How long apps had them", &metrics.app_time)?;
        writer.histogram("call_proxy_seconds", "The rest: what the proxy added", &metrics.proxy_time)?;
        writer.counter("sessions_created", "Sessions that were registered", &metrics.sessions_created)?;
        writer.counters("sessions_ended", "Sessions that ended, by why", "reason", &metrics.sessions_ended)?;
        writer.counter("bridges_attached", "Sockets that became bridges", &metrics.bridges_attached)?;
        writer.counters(
            "bridges_closed",
            "Sockets of apps that were closed, by why",
            "reason",
            &metrics.bridges_closed,
        )?;
        writer.histogram("ping_seconds", "How long apps took to answer a ping", &metrics.ping_time)?;
        writer.counter("bridge_received_frames", "Text frames from apps", &metrics.frames_received)?;
        writer.counter("bridge_received_bytes", "Their bytes", &metrics.bytes_received)?;
        writer.counter("bridge_sent_frames", "Text frames to apps", &metrics.frames_sent)?;
        writer.counter("bridge_sent_bytes", "Their bytes", &metrics.bytes_sent)?;
        writer.counters("apps_refused", "Requests of apps not let in, by why", "reason", &metrics.apps_refused)?;
        writer.counters(
            "clients_refused",
            "Requests of clients not let in, by why",
            "reason",
            &metrics.clients_refused,
        )?;
        let lost = process::audit::lines_lost();
        writer.number("audit_lines_lost", "Lines of the audit log that could not be written", lost)?;
        writer.counters("limit_reached", "How often a setting's limit was met", "limit", &metrics.limits)?;
        writer.counter("results_ignored", "Results for no call in flight", &metrics.results_ignored)?;
        writer.counter("bad_frames", "Frames that were no valid bridge messages", &metrics.bad_frames)?;
        let failed = &metrics.state_file_errors;
        writer.counter("state_file_errors", "Attempts to write the state file that failed", failed)?;
        writer.counter("trace_spans_sent", "Spans that the collector has taken", &metrics.trace_spans_sent)?;
        writer.counter("trace_spans_dropped", "Spans that are lost", &metrics.trace_spans_dropped)
    }
}

/// What the process takes.
pub(super) struct Usage {
    /// Resident bytes.
    pub(super) memory: u64,
    /// When it began, in Unix seconds.
    start: u64,
    /// Time of processors.
    processor: Duration,
}

/// What the process takes now, where the system says that.
pub(super) fn usage() -> Option<Usage> {
    let pid = Pid::from_u32(std::process::id());
    let mut system = System::new();
    let what = ProcessRefreshKind::nothing().with_memory().with_cpu();
    system.refresh_processes_specifics(ProcessesToUpdate::Some(&[pid]), false, what);
    let process = system.process(pid)?;
    let processor = Duration::from_millis(process.accumulated_cpu_time());
    Some(Usage { memory: process.memory(), start: process.start_time(), processor })
}

/// The process, under the names that every exporter uses for it.
#[derive(Debug)]
struct Process;

impl Collector for Process {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> fmt::Result {
        let Some(usage) = usage() else { return Ok(()) };
        let mut writer = Writer(&mut encoder);
        writer.gauge("process_resident_memory_bytes", "Resident memory", usage.memory as usize)?;
        writer.gauge("process_start_time_seconds", "When it began", usage.start as usize)?;
        let seconds = usage.processor.as_secs_f64();
        let mut encoder =
            encoder.encode_descriptor("process_cpu_seconds", "Processor time", None, MetricType::Counter)?;
        encoder.encode_counter::<NoLabelSet, _, f64>(&seconds, None)
    }
}

struct Writer<'a, 'b>(&'a mut DescriptorEncoder<'b>);

impl Writer<'_, '_> {
    fn gauge(&mut self, name: &str, help: &str, value: usize) -> fmt::Result {
        let value = i64::try_from(value).unwrap_or(i64::MAX);
        self.0.encode_descriptor(name, help, None, MetricType::Gauge)?.encode_gauge(&value)
    }

    fn counter(&mut self, name: &str, help: &str, counter: &Counter) -> fmt::Result {
        self.number(name, help, counter.get())
    }

    fn number(&mut self, name: &str, help: &str, count: u64) -> fmt::Result {
        let mut encoder = self.0.encode_descriptor(name, help, None, MetricType::Counter)?;
        encoder.encode_counter::<NoLabelSet, _, f64>(&count, None)
    }

    fn counters<L: Label>(
        &mut self,
        name: &str,
        help: &str,
        label: &'static str,
        counters: &Counters<L>,
    ) -> fmt::Result {
        let mut encoder = self.0.encode_descriptor(name, help, None, MetricType::Counter)?;
        for kind in L::ALL {
            let labels = [(label, kind.word())];
            encoder.encode_family(&labels)?.encode_counter::<NoLabelSet, _, f64>(&counters.get(*kind), None)?;
        }
        Ok(())
    }

    fn histogram(&mut self, name: &str, help: &str, histogram: &Histogram) -> fmt::Result {
        let buckets: Vec<(f64, u64)> =
            histogram.buckets().into_iter().map(|(bound, count)| (bound.min(f64::MAX), count)).collect();
        let count = buckets.iter().map(|(_, count)| count).sum();
        let mut encoder = self.0.encode_descriptor(name, help, None, MetricType::Histogram)?;
        encoder.encode_histogram::<NoLabelSet>(histogram.sum(), count, &buckets, None)
    }
}
