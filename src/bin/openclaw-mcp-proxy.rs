//! The proxy's program: reads the settings, listens, serves until it is told to stop.

use std::io;
use std::process::ExitCode;

use anyhow::Context;
use clap::{Parser, Subcommand};
use openclaw_mcp_proxy::demo::Demo;
use openclaw_mcp_proxy::process;
use openclaw_mcp_proxy::proxy::{Server, config::Config};

/// Lends an app's tools to OpenClaw and any other MCP client. Settings are OPENCLAW_PROXY_* environment variables.
#[derive(Parser)]
#[command(version)]
struct Cli {
    #[command(subcommand)]
    command: Option<Command>,
}

#[derive(Subcommand)]
enum Command {
    /// Serve (what happens without a command, too).
    Serve,
    /// Serve, and show the whole way: an app lends a tool, an MCP client calls it.
    Demo {
        /// Stop after the call.
        #[arg(long)]
        once: bool,
    },
}

/// EX_CONFIG of sysexits.h: something is wrong with the settings.
const EXIT_CONFIG: u8 = 78;

#[tokio::main]
async fn main() -> ExitCode {
    let cli = Cli::parse();
    let config = match Config::from_env() {
        Ok(config) => config,
        Err(error) => return fail(&error.to_string()),
    };
    if let Err(error) = process::init_logging(&config.log, config.log_format) {
        return fail(&error);
    }
    match run(cli.command.unwrap_or(Command::Serve), config).await {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => fail(&format!("{error:#}")),
    }
}

#[expect(clippy::print_stderr, reason = "the one sentence with which the program ends")]
fn fail(message: &str) -> ExitCode {
    eprintln!("openclaw-mcp-proxy: {message}");
    ExitCode::from(EXIT_CONFIG)
}

async fn run(command: Command, config: Config) -> anyhow::Result<()> {
    let shutdown = process::shutdown_token()?;
    let warnings = config.warnings();
    let server = bind(&config, matches!(command, Command::Demo { .. })).await?;
    let base_url = format!("http://{}", server.local_addr()?);
    tracing::info!(version = env!("CARGO_PKG_VERSION"), url = %base_url, "listening");
    for warning in warnings {
        tracing::warn!("{warning}");
    }
    match command {
        Command::Serve => server.run(shutdown).await,
        Command::Demo { once } => {
            let demo = Demo { base_url, app_token: config.app_token, openclaw_token: config.openclaw_token };
            let server = tokio::spawn(server.run(shutdown.clone()));
            let stay = async {
                if !once {
                    shutdown.cancelled().await
                }
            };
            let result = demo.run(&mut io::stdout(), stay).await;
            shutdown.cancel();
            server.await?;
            result?;
        }
    }
    Ok(())
}

/// Listens where the settings say; the demo takes any port if the default one is taken.
async fn bind(config: &Config, any_port: bool) -> anyhow::Result<Server> {
    match Server::bind(config.clone()).await {
        Err(error)
            if any_port && error.kind() == io::ErrorKind::AddrInUse && config.listen == Config::default().listen =>
        {
            let mut free = config.clone();
            free.listen.set_port(0);
            Server::bind(free).await.context("cannot listen on any port")
        }
        result => result.with_context(|| {
            format!("cannot listen on {}; stop the program that does, or set OPENCLAW_PROXY_LISTEN", config.listen)
        }),
    }
}
