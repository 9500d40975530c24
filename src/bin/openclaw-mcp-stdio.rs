//! The stdio program: an MCP server on stdin and stdout that relays to the proxy.

use std::process::ExitCode;

use clap::Parser;
use openclaw_mcp_proxy::auth::Token;
use openclaw_mcp_proxy::process::{self, LogFormat};
use openclaw_mcp_proxy::stdio::{self, endpoint::Options};

/// Connects an MCP client that can only start a process to the OpenClaw MCP Proxy.
#[derive(Parser)]
#[command(name = "openclaw-mcp-stdio", version = process::VERSION)]
struct Cli {
    /// The proxy's base URL [default: http://127.0.0.1:8000]
    #[arg(long, value_name = "URL", env = "OPENCLAW_PROXY_SERVER_URL")]
    proxy_base_url: Option<String>,
    /// The chat session whose tools are served; a client may name it in initialize.params.mcpSessionId instead
    #[arg(long, value_name = "ID", env = "OPENCLAW_PROXY_SESSION_ID", hide_env_values = true)]
    session_id: Option<String>,
    /// The proxy's token for MCP clients; better set in the environment, since everybody can see arguments
    #[arg(long, env = "OPENCLAW_PROXY_OPENCLAW_TOKEN", hide_env_values = true)]
    token: Option<String>,
    /// A whole MCP URL, such as the mcp_url of a session, in place of a base URL and a session
    #[arg(long, value_name = "FULL_MCP_URL")]
    url: Option<String>,
    /// What is logged to stderr
    #[arg(long, value_name = "FILTER", env = "OPENCLAW_PROXY_LOG", default_value = "info")]
    log: String,
}

fn main() -> ExitCode {
    match serve(Cli::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            process::last_words(&format!("openclaw-mcp-stdio: {error:#}"));
            ExitCode::FAILURE
        }
    }
}

fn serve(cli: Cli) -> anyhow::Result<()> {
    process::init_logging(&cli.log, LogFormat::Human, None).map_err(anyhow::Error::msg)?;
    let options = Options {
        base_url: cli.proxy_base_url,
        url: cli.url,
        token: Token::new(cli.token.unwrap_or_default()),
        session_id: cli.session_id,
    };
    // One thread is plenty, and starts quickest.
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let ended = runtime.block_on(async {
        let stop = process::shutdown_token()?;
        stdio::run(&options, std::io::stdin(), std::io::stdout(), stop).await
    });
    // Does not wait for a name that is still being looked up.
    runtime.shutdown_background();
    Ok(ended?)
}
