//! Load generator for MCP proxies that forward tool calls to apps over a WebSocket bridge.
//!
//! It plays both sides: apps that register sessions and echo every call on their bridges, and
//! MCP clients that call over HTTP. Each run prints one JSON object on standard output.

mod app;
mod calls;
mod churn;
mod http;
mod idle;
mod proc;
mod stats;
mod target;

use std::process::ExitCode;

use anyhow::Result;
use clap::{Parser, Subcommand};
use serde_json::Value;

use crate::target::{Target, TargetArgs};

#[derive(Parser)]
#[command(about = "Load generator for MCP proxies with a WebSocket bridge to apps")]
struct Cli {
    #[command(flatten)]
    target: TargetArgs,
    /// Threads of the generator.
    #[arg(long, default_value_t = 1, global = true)]
    threads: usize,
    #[command(subcommand)]
    mode: Mode,
}

#[derive(Subcommand)]
enum Mode {
    /// Call tools over HTTP and report rate, latency and server CPU per call.
    Calls(calls::CallArgs),
    /// Open many idle sessions and report server memory per session.
    Idle(idle::IdleArgs),
    /// Register and delete sessions as fast as the server allows.
    Churn(churn::ChurnArgs),
}

fn main() -> ExitCode {
    match run(Cli::parse()) {
        Ok(report) => {
            println!("{report:#}");
            ExitCode::SUCCESS
        }
        Err(error) => {
            eprintln!("{error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run(cli: Cli) -> Result<Value> {
    let target = Target::new(cli.target)?;
    proc::raise_file_limit();
    let runtime =
        tokio::runtime::Builder::new_multi_thread().worker_threads(cli.threads.max(1)).enable_all().build()?;
    runtime.block_on(async {
        match cli.mode {
            Mode::Calls(args) => calls::run(target, args).await,
            Mode::Idle(args) => idle::run(target, args).await,
            Mode::Churn(args) => churn::run(target, args).await,
        }
    })
}
