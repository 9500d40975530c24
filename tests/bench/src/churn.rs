//! The `churn` mode: how fast sessions come and go.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use clap::Args;
use serde::Serialize;
use serde_json::Value;

use crate::app::{self, Echo};
use crate::http::Conn;
use crate::proc;
use crate::stats::{Summary, latencies, round};
use crate::target::Target;

#[derive(Args, Clone, Debug)]
pub struct ChurnArgs {
    /// Connections that register and delete.
    #[arg(long, short, default_value_t = 16)]
    pub connections: usize,
    /// Seconds measured.
    #[arg(long, short = 't', default_value_t = 5.0)]
    pub duration: f64,
    /// Connect each session's bridge before deleting the session.
    #[arg(long)]
    pub bridge: bool,
    /// Sessions kept open beside those that come and go.
    #[arg(long, default_value_t = 0)]
    pub standing: usize,
}

#[derive(Serialize)]
struct Report {
    mode: &'static str,
    connections: usize,
    bridges: bool,
    standing: usize,
    duration_s: f64,
    cycles: u64,
    errors: u64,
    first_error: Option<String>,
    cycles_per_s: f64,
    register_us: Summary,
    bridge_us: Option<Summary>,
    delete_us: Summary,
    server_cpu_us_per_cycle: Option<f64>,
    rss_kib_before: u64,
    rss_kib_after: u64,
}

pub async fn run(target: Target, args: ChurnArgs) -> Result<Value> {
    let standing = app::open(&target, 0, args.standing, 32, None).await?;
    let stop = Arc::new(AtomicBool::new(false));
    let rss_kib_before = proc::rss_kib(target.pids());
    let cpu_before = proc::cpu(target.pids());
    let began = Instant::now();
    let workers: Vec<_> =
        (0..args.connections).map(|i| tokio::spawn(worker(target.clone(), stop.clone(), i, args.bridge))).collect();
    tokio::time::sleep(Duration::from_secs_f64(args.duration)).await;
    stop.store(true, Ordering::Relaxed);

    let (mut register, mut bridge, mut delete) = (latencies(), latencies(), latencies());
    let (mut errors, mut first_error) = (0, None);
    for worker in workers {
        let part = worker.await?;
        register.add(&part.register).context("histogram")?;
        bridge.add(&part.bridge).context("histogram")?;
        delete.add(&part.delete).context("histogram")?;
        errors += part.errors;
        first_error = first_error.or(part.first_error);
    }
    let took = began.elapsed().as_secs_f64();
    let cpu = proc::cpu(target.pids()).since(cpu_before).total();
    tokio::time::sleep(Duration::from_secs(1)).await;
    let rss_kib_after = proc::rss_kib(target.pids());
    app::close(&target, standing).await;

    let cycles = delete.len();
    let report = Report {
        mode: "churn",
        connections: args.connections,
        bridges: args.bridge,
        standing: args.standing,
        duration_s: round(took, 3),
        cycles,
        errors,
        first_error,
        cycles_per_s: round(cycles as f64 / took, 1),
        register_us: (&register).into(),
        bridge_us: args.bridge.then(|| (&bridge).into()),
        delete_us: (&delete).into(),
        server_cpu_us_per_cycle: (!target.pids().is_empty()).then(|| round(cpu * 1e6 / cycles.max(1) as f64, 1)),
        rss_kib_before,
        rss_kib_after,
    };
    Ok(serde_json::to_value(report)?)
}

struct Part {
    register: crate::stats::Latencies,
    bridge: crate::stats::Latencies,
    delete: crate::stats::Latencies,
    errors: u64,
    first_error: Option<String>,
}

async fn worker(target: Target, stop: Arc<AtomicBool>, index: usize, with_bridge: bool) -> Part {
    let mut part =
        Part { register: latencies(), bridge: latencies(), delete: latencies(), errors: 0, first_error: None };
    let mut conn = Conn::new(&target.authority);
    while !stop.load(Ordering::Relaxed) {
        if let Err(error) = cycle(&target, &mut conn, index, with_bridge, &mut part).await {
            part.errors += 1;
            part.first_error.get_or_insert(format!("{error:#}"));
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    }
    part
}

async fn cycle(target: &Target, conn: &mut Conn, index: usize, with_bridge: bool, part: &mut Part) -> Result<()> {
    let began = Instant::now();
    let session = app::register(conn, target, index).await?;
    part.register.saturating_record(began.elapsed().as_micros() as u64);
    if with_bridge {
        let began = Instant::now();
        let echo = Echo { delay: Duration::ZERO, buffer: 4 << 10 };
        app::attach(target, &session, echo).await?;
        part.bridge.saturating_record(began.elapsed().as_micros() as u64);
    }
    let began = Instant::now();
    app::delete(conn, target, &session).await?;
    part.delete.saturating_record(began.elapsed().as_micros() as u64);
    Ok(())
}
