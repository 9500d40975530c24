//! The command line for one call of the local MCP server.

use std::io;
use std::process::ExitCode;

use openclaw_mcp_proxy::winnode;

fn main() -> ExitCode {
    // What is not Unicode names no flag; it is quoted as far as it can be.
    let args: Vec<String> = std::env::args_os().skip(1).map(|arg| arg.to_string_lossy().into_owned()).collect();
    let env = |name: &str| std::env::var(name).ok();
    // One thread is plenty, and starts quickest.
    let Ok(runtime) = tokio::runtime::Builder::new_current_thread().enable_all().build() else {
        return ExitCode::FAILURE;
    };
    let code = runtime.block_on(winnode::run(&args, env, &mut io::stdout(), &mut io::stderr()));
    // Does not wait for a name that is still being looked up.
    runtime.shutdown_background();
    ExitCode::from(code)
}
