/** The bundled source of sampling/worker.ts, which build.mjs puts here. */
declare module "worker:sampling" {
  const source: string;
  export default source;
}
