"""stable-baselines3: PPO on CartPole."""

from stable_baselines3 import PPO
from weights import save_digest

model = PPO("MlpPolicy", "CartPole-v1", n_steps=64, batch_size=32, n_epochs=2, seed=0, device="cpu")
model.learn(total_timesteps=512)
save_digest(model.policy, updates=model._n_updates)
