//! The node's program: reads flags, lends until it is told to stop, ends with a code.

use std::process::ExitCode;

use clap::{Parser, Subcommand};
use openclaw_mcp_proxy::node::lend::{self, LendArgs};
use openclaw_mcp_proxy::process::{self, LogFormat};

/// Lends tools of this computer to OpenClaw and any other MCP client, through the OpenClaw MCP Proxy.
#[derive(Parser)]
#[command(version)]
struct Cli {
    #[command(subcommand)]
    command: Command,
    /// What is logged to stderr
    #[arg(long, global = true, value_name = "FILTER", env = "OPENCLAW_PROXY_LOG", default_value = "info,rmcp=warn")]
    log: String,
}

#[derive(Subcommand)]
enum Command {
    /// Lend the tools of an MCP server that already exists: one with a URL, or a program that speaks on stdio.
    Lend(LendArgs),
}

/// EX_CONFIG of sysexits.h: something is wrong with the settings, and trying again does not help.
const EXIT_CONFIG: u8 = 78;

#[tokio::main]
async fn main() -> ExitCode {
    let Cli { command: Command::Lend(args), log } = Cli::parse();
    if let Err(error) = process::init_logging(&log, LogFormat::Human) {
        return fail(EXIT_CONFIG, &error);
    }
    let stop = match process::shutdown_token() {
        Ok(stop) => stop,
        Err(error) => return fail(1, &error.to_string()),
    };
    match lend::lend(args.into(), &mut std::io::stdout(), stop).await {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => fail(if error.is_config() { EXIT_CONFIG } else { 1 }, &error.to_string()),
    }
}

#[expect(clippy::print_stderr, reason = "the one sentence with which the program ends")]
fn fail(code: u8, message: &str) -> ExitCode {
    eprintln!("openclaw-node: {message}");
    ExitCode::from(code)
}
