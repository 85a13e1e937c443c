{{- define "rose.labels" -}}
app.kubernetes.io/name: rose
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
{{- end }}

{{/* Of the token files in the secret the one that the program needs, and no other: (dict "root" $ "part" ...), and with "key" the key that signs
weights, the trainer's alone.  A secret is root's, and open to fsGroup: not a token file that ROSE reads.  So it is copied, of the pod's user and for it alone. */}}
{{- define "rose.tokens.volumes" -}}
- name: tokens-secret
  secret:
    secretName: {{ .root.Values.tokensSecret }}
    defaultMode: 0440
    items:
      - key: {{ .part }}.toml
        path: tokens.toml
      {{- if .key }}
      - key: {{ .key }}
        path: tokens.key
      {{- end }}
- name: tokens
  emptyDir:
    medium: Memory
    sizeLimit: 1Mi
{{- end }}

{{- define "rose.tokens.command" -}}
{{- if .key }}
command: [install, -m, "0600", -t, /tokens, /secret/tokens.toml, /secret/tokens.key]
{{- else }}
command: [install, -m, "0600", -t, /tokens, /secret/tokens.toml]
{{- end }}
volumeMounts:
  - name: tokens-secret
    mountPath: /secret
    readOnly: true
  - name: tokens
    mountPath: /tokens
{{- end }}

{{- define "rose.tokens.mount" -}}
- name: tokens
  mountPath: /tokens
  readOnly: true
{{- end }}
