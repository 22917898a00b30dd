{{/* The pod of a role: root, facts, role, fact. Of a worker that spans hosts, the pod of each host. */}}
{{- define "pdserve.pod" -}}
{{- $root := .root }}
{{- $facts := .facts }}
{{- $role := .role }}
{{- $fact := .fact }}
{{- $ids := dict "root" $root "component" $role }}
{{- $frontend := eq $role "frontend" }}
{{- $with := dict "root" $root "keys" $frontend }}
{{- $values := $fact.values }}
{{- $rdma := and $root.Values.rdma.resource (not $frontend) }}
{{- $spans := gt (int $fact.nodes) 1 }}
metadata:
  labels:
    {{- include "pdserve.labels" $ids | nindent 4 }}
  annotations:
    prometheus.io/scrape: "true"
    prometheus.io/port: {{ $facts.pages | quote }}
    prometheus.io/path: /metrics
spec:
  automountServiceAccountToken: false
  enableServiceLinks: false
  # Running requests finish; KV that was prefilled is read or its lease ends; then the process ends.
  terminationGracePeriodSeconds: {{ add $facts.drain 45 (ternary 5 0 $frontend) }}
  {{- with $root.Values.imagePullSecrets }}
  imagePullSecrets:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  securityContext:
    {{- include "pdserve.podSecurity" $root | nindent 4 }}
  topologySpreadConstraints:
    - maxSkew: 1
      topologyKey: kubernetes.io/hostname
      whenUnsatisfiable: ScheduleAnyway
      labelSelector:
        matchLabels:
          {{- include "pdserve.selector" $ids | nindent 10 }}
  {{- if not $frontend }}
  affinity:
    podAffinity:
      preferredDuringSchedulingIgnoredDuringExecution:
        - weight: 100
          podAffinityTerm:
            topologyKey: {{ $root.Values.topologyKey }}
            labelSelector:
              matchLabels:
                app.kubernetes.io/name: pdserve
                app.kubernetes.io/instance: {{ $root.Release.Name }}
              matchExpressions:
                - {key: app.kubernetes.io/component, operator: In, values: [decode, prefill, both]}
  {{- end }}
  {{- with $root.Values.download }}
  initContainers:
    - name: download
      image: {{ include "pdserve.image" $root }}
      imagePullPolicy: {{ $root.Values.image.pullPolicy }}
      command: [sh, -c, "for model in \"$@\"; do hf download \"$model\" --local-dir \"/models/$model\" || exit; done", download]
      args:
        {{- toYaml . | nindent 8 }}
      env:
        {{- include "pdserve.env" $with | nindent 8 }}
      resources:
        {{- toYaml $values.resources | nindent 8 }}
      securityContext:
        {{- include "pdserve.containerSecurity" $root | nindent 8 }}
      volumeMounts:
        - {name: models, mountPath: /models}
        - {name: home, mountPath: /var/lib/pdserve}
        - {name: tmp, mountPath: /tmp}
  {{- end }}
  containers:
    - name: {{ $role }}
      image: {{ include "pdserve.image" $root }}
      imagePullPolicy: {{ $root.Values.image.pullPolicy }}
      args: [{{ $role }}, -f, /etc/pdserve/graph/graph.yaml{{ if $spans }}, --node-rank=$(PDSERVE_NODE_RANK){{ end }}]
      env:
        {{- if $spans }}
        {{- $label := "metadata.labels['leaderworkerset.sigs.k8s.io/%s']" }}
        - {name: PDSERVE_NODE_RANK, valueFrom: {fieldRef: {fieldPath: {{ printf $label "worker-index" | quote }}}}}
        - {name: PDSERVE_NODE_GROUP, valueFrom: {fieldRef: {fieldPath: {{ printf $label "group-index" | quote }}}}}
        {{- end }}
        - {name: PDSERVE_HOST, valueFrom: {fieldRef: {fieldPath: status.podIP}}}
        - {name: PDSERVE_PAGES_PORT, value: {{ $facts.pages | quote }}}
        - {name: PDSERVE_STREAM_PORT, value: {{ $facts.stream | quote }}}
        - {name: PDSERVE_NATS, value: {{ include "pdserve.nats" $root | quote }}}
        - {name: PDSERVE_ETCD, value: {{ include "pdserve.etcd" $root | quote }}}
        - {name: PDSERVE_CREDENTIALS, value: /etc/pdserve/credentials}
        {{- include "pdserve.env" $with | nindent 8 }}
      ports:
        - {name: pages, containerPort: {{ $facts.pages }}}
        {{- if $frontend }}
        - {name: http, containerPort: {{ $facts.port }}}
        {{- else }}
        - {name: stream, containerPort: {{ $facts.stream }}}
        {{- end }}
      startupProbe:
        httpGet: {path: /ready, port: pages}
        periodSeconds: 30
        failureThreshold: 120
        timeoutSeconds: 5
      readinessProbe:
        httpGet: {path: /ready, port: pages}
        periodSeconds: 5
        timeoutSeconds: 5
      livenessProbe:
        httpGet: {path: /live, port: pages}
        periodSeconds: 10
        failureThreshold: 6
        timeoutSeconds: 5
      {{- if $frontend }}
      lifecycle:
        preStop: {exec: {command: [sleep, "5"]}}  # until no Service sends requests here
      {{- end }}
      resources:
        {{- $limits := dict }}
        {{- if $fact.gpus }}{{ $_ := set $limits $root.Values.gpu.resource $fact.gpus }}{{ end }}
        {{- if $rdma }}{{ $_ := set $limits $root.Values.rdma.resource 1 }}{{ end }}
        {{- merge (dict "limits" $limits) (deepCopy $values.resources) | toYaml | nindent 8 }}
      securityContext:
        {{- include "pdserve.containerSecurity" $root | nindent 8 }}
          {{- if $rdma }}
          add: [IPC_LOCK]
          {{- end }}
      volumeMounts:
        - {name: credentials, mountPath: /etc/pdserve/credentials, readOnly: true}
        {{- include "pdserve.mounts" $with | nindent 8 }}
        {{- if not $frontend }}
        - {name: shm, mountPath: /dev/shm}
        {{- if $root.Values.kvOffloadFolder }}
        - {name: kv-offload, mountPath: /kv-offload}
        {{- end }}
        {{- end }}
  volumes:
    - {name: graph, configMap: {name: {{ include "pdserve.configMap" $root }}}}
    - {{- include "pdserve.credentialsVolume" $root | nindent 6 }}
    {{- include "pdserve.volumes" $with | nindent 4 }}
    {{- if not $frontend }}
    - {name: shm, emptyDir: {medium: Memory, sizeLimit: {{ $root.Values.shm }}}}
    {{- with $root.Values.kvOffloadFolder }}
    - name: kv-offload
      {{- toYaml . | nindent 6 }}
    {{- end }}
    {{- end }}
{{- end -}}
