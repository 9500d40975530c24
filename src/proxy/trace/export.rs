//! What sends spans to the collector: one task, which waits for nobody and for which nobody waits.
//!
//! Calls that have ended wait in a bounded queue until there are enough of them, or the first has waited long enough.
//! What cannot be sent is dropped, counted, and told in the log now and then. Nothing is sent twice: a collector beside
//! the proxy is the one to try again. When the proxy stops, what waits is sent, within [`FLUSH_GRACE`].

use std::sync::Arc;
use std::time::{Duration, Instant};

use http::header::CONTENT_TYPE;
use http::{HeaderMap, HeaderValue};
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;

use super::settings::TraceSettings;
use super::{Traced, otlp};
use crate::http_client::{self, HttpClient, HttpError};
use crate::proxy::records::Records;

/// How long the last spans may take to be sent when the proxy stops.
pub const FLUSH_GRACE: Duration = Duration::from_secs(3);
/// How often it is logged that spans cannot be sent.
const COMPLAINT_INTERVAL: Duration = Duration::from_secs(60);
/// The most bytes of a collector's answer that are read.
const MAX_ANSWER_BYTES: usize = 64 * 1024;

/// Sends spans. It owns the queue.
#[derive(Debug)]
pub struct Exporter {
    settings: TraceSettings,
    headers: HeaderMap,
    http: HttpClient,
    queue: mpsc::Receiver<Traced>,
    complained: Option<Instant>,
}

impl Exporter {
    pub(super) fn new(settings: TraceSettings, queue: mpsc::Receiver<Traced>) -> Result<Self, String> {
        let http = HttpClient::new(&settings.endpoint)?;
        let mut headers = settings.headers.clone();
        headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/x-protobuf"));
        Ok(Exporter { settings, headers, http, queue, complained: None })
    }

    /// Sends until `stop`, and then what is left.
    pub async fn run(mut self, records: Arc<Records>, stop: CancellationToken) {
        tracing::info!(collector = self.collector(), "tracing calls");
        let mut batch = Vec::new();
        let too_late = async {
            stop.cancelled().await;
            tokio::time::sleep(FLUSH_GRACE).await;
        };
        tokio::select! {
            () = self.send_all(&mut batch, &records, &stop) => return,
            () = too_late => {}
        }
        self.queue.close();
        while let Ok(call) = self.queue.try_recv() {
            batch.push(call);
        }
        let spans = count(&batch);
        records.metrics.trace_spans_dropped.add(spans);
        tracing::warn!(spans, "the last spans could not be sent in time; they are lost");
    }

    async fn send_all(&mut self, batch: &mut Vec<Traced>, records: &Records, stop: &CancellationToken) {
        loop {
            let most = (self.settings.batch_spans / 2).max(1);
            let is_stopping = stop.run_until_cancelled(self.fill(batch, most)).await.is_none();
            if is_stopping {
                // Whoever ends a call from now on is told that it is too late.
                self.queue.close();
                while batch.len() < most
                    && let Ok(call) = self.queue.try_recv()
                {
                    batch.push(call);
                }
                if batch.is_empty() {
                    return;
                }
            }
            let spans = count(batch);
            let dropped = match self.send(batch).await {
                Ok(rejected) => rejected.min(spans),
                Err(why) => {
                    self.complain(&why, spans);
                    spans
                }
            };
            batch.clear();
            records.metrics.trace_spans_dropped.add(dropped);
            records.metrics.trace_spans_sent.add(spans - dropped);
        }
    }

    /// Waits for a call, and then until there are so many, or the first has waited long enough.
    async fn fill(&mut self, batch: &mut Vec<Traced>, most: usize) {
        if batch.is_empty() {
            self.queue.recv_many(batch, 1).await;
        }
        let due = tokio::time::Instant::now() + self.settings.delay;
        while batch.len() < most {
            let room = most - batch.len();
            match tokio::time::timeout_at(due, self.queue.recv_many(batch, room)).await {
                Ok(received) if received > 0 => {}
                _ => return,
            }
        }
    }

    /// Sends them: how many spans the collector did not want, or why nothing has arrived.
    async fn send(&self, batch: &[Traced]) -> Result<u64, String> {
        let body = otlp::request(&self.settings.resource, batch);
        let sending = async {
            let answer = self.http.post_once(&self.settings.endpoint, &self.headers, body.into()).await?;
            let status = answer.status();
            Ok::<_, HttpError>((status, http_client::read(answer.into_body(), MAX_ANSWER_BYTES).await?))
        };
        match tokio::time::timeout(self.settings.timeout, sending).await {
            Ok(Ok((status, answer))) if status.is_success() => Ok(otlp::rejected(&answer)),
            Ok(Ok((status, _))) => Err(format!("it answered {status}")),
            Ok(Err(error)) => Err(error.to_string()),
            Err(_) => Err(format!("it did not answer within {} s", self.settings.timeout.as_secs_f64())),
        }
    }

    fn collector(&self) -> &str {
        self.settings.endpoint.authority().map_or("", |authority| authority.as_str())
    }

    fn complain(&mut self, why: &str, spans: u64) {
        let now = Instant::now();
        if self.complained.is_none_or(|last| now.duration_since(last) >= COMPLAINT_INTERVAL) {
            self.complained = Some(now);
            tracing::warn!(
                collector = self.collector(),
                spans,
                "spans cannot be sent to the collector and are lost: {why}"
            );
        }
    }
}

fn count(calls: &[Traced]) -> u64 {
    calls.iter().map(Traced::spans).sum()
}
